//! Leases for programs in C: what `include/hugemm_lease.h` says, on [`hugemm_lease::client`].

use hugemm_lease::client::{Connection, Lease, MappedLease, default_socket};
use hugemm_lease::memory_file::Page;
use hugemm_lease::wire::Wish;
use std::cell::RefCell;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::ptr::{NonNull, null_mut};

/// A lease, as C sees it: a name for what it points to.
#[derive(Debug)]
pub struct HugemmLease {
    lease: Lease,
    mapping: Option<MappedLease>,
}

/// What is wanted: `struct hugemm_lease_options`.
#[derive(Debug)]
#[repr(C)]
pub struct Options {
    socket: *const c_char,
    page: *const c_char,
    node: *const c_int,
    keep: *const c_char,
    secret: *const c_char,
}

thread_local! {
    static ERROR: RefCell<CString> = RefCell::default();
}

/// Remembers why a call failed; a message with a zero byte in it, which none has, is none.
fn failed<T>(why: impl ToString) -> *mut T {
    let message = CString::new(why.to_string()).unwrap_or_default();
    ERROR.with(|error| error.replace(message));
    null_mut()
}

/// # Safety
///
/// Null, or a string with its end that outlives the answer.
unsafe fn text<'a>(text: *const c_char) -> Option<&'a CStr> {
    // SAFETY: by the contract.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })
}

fn take(bytes: u64, options: Option<&Options>) -> Result<Lease, String> {
    // SAFETY: the strings of options outlive the call, by the contract of `hugemm_lease_take`.
    let of = |get: fn(&Options) -> *const c_char| options.and_then(|options| unsafe { text(get(options)) });
    let path = |text: &CStr| PathBuf::from(OsStr::from_bytes(text.to_bytes()));
    let page = match of(|options| options.page).map(CStr::to_bytes) {
        None => None,
        Some(b"2M") => Some(Page::Huge2M),
        Some(b"1G") => Some(Page::Huge1G),
        Some(b"thp") => Some(Page::Transparent),
        Some(other) => return Err(format!("'{}' is none of 2M, 1G and thp", String::from_utf8_lossy(other))),
    };
    // SAFETY: null, or a number that outlives the call, by the same contract.
    let node = options.and_then(|options| unsafe { options.node.as_ref() });
    let node = node.map(|node| u32::try_from(*node).map_err(|_| format!("{node} is no node"))).transpose()?;
    let wish = Wish { page, node, ..Wish::of(bytes) };
    let connection = Connection::open(&of(|options| options.socket).map_or_else(default_socket, path));
    let connection = connection.map_err(|error| error.to_string())?;
    let lease = match (of(|options| options.keep), of(|options| options.secret).map(path)) {
        (None, _) => connection.lease(wish),
        (Some(_), None) => return Err("kept memory needs a file for its secret".to_owned()),
        (Some(name), Some(file)) => connection.lease_kept(wish, &name.to_string_lossy(), &file),
    };
    lease.map_err(|error| error.to_string())
}

/// Leases memory; null on error.
///
/// # Safety
///
/// `options` is null, or as the header says; its strings have their ends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hugemm_lease_take(bytes: u64, options: *const Options) -> *mut HugemmLease {
    // SAFETY: null or valid, by the contract.
    match take(bytes, unsafe { options.as_ref() }) {
        Ok(lease) => Box::into_raw(Box::new(HugemmLease { lease, mapping: None })),
        Err(why) => failed(why),
    }
}

/// The file's descriptor.
///
/// # Safety
///
/// A lease that has not ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hugemm_lease_fd(lease: *const HugemmLease) -> c_int {
    // SAFETY: by the contract.
    unsafe { (*lease).lease.file.as_raw_fd() }
}

/// A mapping of all of it; null on error.
///
/// # Safety
///
/// A lease that has not ended, used by no other thread meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hugemm_lease_map(lease: *mut HugemmLease) -> *mut c_void {
    // SAFETY: by the contract.
    let HugemmLease { lease, mapping } = unsafe { &mut *lease };
    if mapping.is_none() {
        match lease.map() {
            Ok(new) => *mapping = Some(new),
            Err(error) => return failed(format!("the lease cannot be mapped: {error}")),
        }
    }
    mapping.as_ref().map_or(null_mut(), |mapping| mapping.at().as_ptr())
}

/// Whether it has its former bytes.
///
/// # Safety
///
/// A lease that has not ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hugemm_lease_resumed(lease: *const HugemmLease) -> c_int {
    // SAFETY: by the contract.
    unsafe { (*lease).lease.about.resumed }.into()
}

/// Ends it.
///
/// # Safety
///
/// Null, or a lease that has not ended, whose memory nobody uses any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hugemm_lease_end(lease: *mut HugemmLease) {
    if let Some(lease) = NonNull::new(lease) {
        // SAFETY: made by `hugemm_lease_take`, and ended once, by the contract. The mapping goes before the file.
        let HugemmLease { lease, mapping } = *unsafe { Box::from_raw(lease.as_ptr()) };
        drop(mapping);
        // If the daemon is gone, so is the lease.
        let _ = lease.end();
    }
}

/// Why the last call of this thread failed.
#[unsafe(no_mangle)]
pub extern "C" fn hugemm_lease_error() -> *const c_char {
    ERROR.with(|error| error.borrow().as_ptr())
}
