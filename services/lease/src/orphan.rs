//! A process that is nobody's child, so that a program which this one becomes does not find one that it has not started.
//!
//! Two are made, for it is its parent's end that makes an orphan. The first has no memory of its own: it has this process's, which
//! stands still meanwhile (`CLONE_VM`, `CLONE_VFORK`, clone(2), as posix_spawn(3) uses them), so only the second one costs a copy.

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
use std::ffi::{c_int, c_void};
use std::io;

/// What the first of the two is given.
struct Start<'a> {
    life: &'a mut dyn FnMut() -> c_int,
    /// The second one's number, or why there is none.
    made: io::Result<u32>,
}

/// Runs `life` in a process of its own, which has a copy of this one's memory and a session of its own, and ends with what it returns.
/// Returns that process's number, before it has begun.
///
/// # Errors
///
/// The system's: no process, or no memory.
///
/// # Safety
///
/// This process has one thread, or `life` does nothing that another thread may have been half way through.
pub(crate) unsafe fn start(life: &mut dyn FnMut() -> c_int) -> io::Result<u32> {
    let stack = Stack::new()?;
    let mut start = Start { life, made: Err(io::ErrorKind::OutOfMemory.into()) };
    // No SIGCHLD, of which the program may want to hear nothing, or which it may ignore.
    let flags = libc::CLONE_VM | libc::CLONE_VFORK;
    // SAFETY: it runs on a stack of its own, and uses the memory of this thread, which waits until it has ended.
    let first = unsafe { libc::clone(begin, stack.top(), flags, (&raw mut start).cast()) };
    if first < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: waits for the child just made.
    while unsafe { libc::waitpid(first, std::ptr::null_mut(), libc::__WCLONE) } < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    start.made
}

/// The first one's life. The second one's is on the same stack, in its own copy.
extern "C" fn begin(start: *mut c_void) -> c_int {
    // SAFETY: what `start` gives it, whose owner waits.
    let start = unsafe { &mut *start.cast::<Start<'_>>() };
    let _ = rustix::process::setsid();
    // SAFETY: as `start` promises.
    match unsafe { libc::fork() } {
        0 => exit((start.life)()),
        pid => {
            start.made = u32::try_from(pid).map_err(|_| io::Error::last_os_error());
            exit(0)
        }
    }
}

/// Ends the process without running what the program had registered for its own end.
fn exit(code: c_int) -> ! {
    // SAFETY: nothing of this process is used from here on.
    unsafe { libc::_exit(code) }
}

/// Memory to run on, which grows down to a page that is not there.
struct Stack(*mut c_void);

impl Stack {
    const BYTES: usize = 1 << 20;
    /// As large as a page of any machine.
    const GUARD: usize = 1 << 16;

    fn new() -> io::Result<Self> {
        // SAFETY: at an address of the kernel's choice; no memory that exists is touched.
        let stack = Stack(unsafe {
            mmap_anonymous(std::ptr::null_mut(), Self::GUARD + Self::BYTES, ProtFlags::empty(), MapFlags::PRIVATE)
        }?);
        let rights = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: a part of what was just mapped.
        unsafe { mprotect(stack.0.wrapping_byte_add(Self::GUARD), Self::BYTES, rights) }?;
        Ok(stack)
    }

    fn top(&self) -> *mut c_void {
        self.0.wrapping_byte_add(Self::GUARD + Self::BYTES)
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and nobody runs on it any more.
        let _ = unsafe { munmap(self.0, Self::GUARD + Self::BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    /// Whoever waits for any child at all does not find it, and its session is not this process's.
    #[test]
    fn it_is_nobodys_child() {
        let (mut read, write) = io::pipe().expect("a pipe");
        let (fd, here) = (write.as_raw_fd(), std::process::id());
        // SAFETY: system calls, and no allocation.
        let number = unsafe {
            start(&mut || {
                // It is adopted before this process goes on, or soon.
                (0..5000).take_while(|_| libc::getppid() as u32 == here).for_each(|_| {
                    libc::usleep(1000);
                });
                let said = [libc::getpid(), libc::getsid(0)];
                libc::write(fd, said.as_ptr().cast(), size_of_val(&said)) as c_int
            })
        };
        let number = number.expect("a process");
        drop(write);
        let mut said = [0; 8];
        io::Read::read_exact(&mut read, &mut said).expect("it says so");
        let [pid, session] = [0, 4].map(|at| i32::from_ne_bytes([said[at], said[at + 1], said[at + 2], said[at + 3]]));
        assert_eq!(pid as u32, number);
        // SAFETY: a number.
        assert_ne!(session, unsafe { libc::getsid(0) });
        assert_ne!(session, pid, "it can have no terminal");
        // SAFETY: waits for nobody.
        let waited = unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::__WALL | libc::WNOHANG) };
        assert_eq!((waited, io::Error::last_os_error().raw_os_error()), (-1, Some(libc::ECHILD)));
    }
}
