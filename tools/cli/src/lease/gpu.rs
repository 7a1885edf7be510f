//! Memory registered with a GPU's runtime, the CUDA driver's interface, where a machine has it: looked for when it is asked for, and
//! linked by nobody.

use anyhow::{Context, Result, bail};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::marker::PhantomData;

/// `cuInit`, `cuDeviceGet` and the like answer by a number, 0 if all is well.
type Answer = c_int;

/// The first GPU, with its memory's context current on the thread that made this.
pub(super) struct Gpu {
    register: unsafe extern "C" fn(*mut c_void, usize, c_uint) -> Answer,
    unregister: unsafe extern "C" fn(*mut c_void) -> Answer,
    name: String,
    /// A context is current on one thread.
    _thread: PhantomData<*mut ()>,
}

/// What the library calls this.
fn symbol(library: *mut c_void, name: &CStr) -> Result<*mut c_void> {
    // SAFETY: `library` is one that is open, and is never closed.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    if found.is_null() {
        bail!("it has no {}", name.to_string_lossy());
    }
    Ok(found)
}

fn well(call: &str, answer: Answer) -> Result<()> {
    if answer != 0 {
        bail!("{call} answers error {answer}");
    }
    Ok(())
}

impl Gpu {
    /// The first of this machine; `None` where it has no runtime.
    pub(super) fn find() -> Result<Option<Gpu>> {
        // SAFETY: a library's own start is all that is run; it stays open, for its threads go on.
        let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
        if library.is_null() {
            return Ok(None);
        }
        Self::of(library).context("libcuda.so.1").map(Some)
    }

    fn of(library: *mut c_void) -> Result<Gpu> {
        let (mut device, mut context, mut name) = (0 as c_int, std::ptr::null_mut::<c_void>(), [0 as c_char; 128]);
        // SAFETY: the types are those of cuda.h for these names (of `cuMemHostRegister` its second version, as cuda.h names it), which
        // the driver keeps; what they are given to write to is as long as they are told, and outlives the call.
        unsafe {
            let init: unsafe extern "C" fn(c_uint) -> Answer = std::mem::transmute(symbol(library, c"cuInit")?);
            let get: unsafe extern "C" fn(*mut c_int, c_int) -> Answer =
                std::mem::transmute(symbol(library, c"cuDeviceGet")?);
            let get_name: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> Answer =
                std::mem::transmute(symbol(library, c"cuDeviceGetName")?);
            let retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> Answer =
                std::mem::transmute(symbol(library, c"cuDevicePrimaryCtxRetain")?);
            let make_current: unsafe extern "C" fn(*mut c_void) -> Answer =
                std::mem::transmute(symbol(library, c"cuCtxSetCurrent")?);
            let register = std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void, usize, c_uint) -> Answer>(
                symbol(library, c"cuMemHostRegister_v2")?,
            );
            let unregister = std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void) -> Answer>(symbol(
                library,
                c"cuMemHostUnregister",
            )?);
            well("cuInit", init(0))?;
            well("cuDeviceGet", get(&raw mut device, 0))?;
            well("cuDeviceGetName", get_name(name.as_mut_ptr(), name.len() as c_int - 1, device))?;
            well("cuDevicePrimaryCtxRetain", retain(&raw mut context, device))?;
            well("cuCtxSetCurrent", make_current(context))?;
            let name = CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned();
            Ok(Gpu { register, unregister, name, _thread: PhantomData })
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Has the device reach these bytes, until they are [let go](Self::let_go).
    pub(super) fn register(&self, at: *mut c_void, bytes: usize) -> Result<()> {
        // SAFETY: no byte is read or written; the driver takes pins on the pages, or refuses.
        well("cuMemHostRegister", unsafe { (self.register)(at, bytes, 0) })
    }

    pub(super) fn let_go(&self, at: *mut c_void) -> Result<()> {
        // SAFETY: as above; what was not registered is refused.
        well("cuMemHostUnregister", unsafe { (self.unregister)(at) })
    }
}
