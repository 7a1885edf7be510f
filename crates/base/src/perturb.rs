//! Atomics that let other threads run now and then, under `cfg(perturb)`: races that need a thread to stop between two particular
//! steps, which a quiet machine shows once in a hundred runs, show in a few.
//!
//! Each operation is `core`'s. Before it, one in 16 times, the thread yields; one in 512 times it sleeps for some tens of
//! microseconds, in which the others take many steps. loom explores every order of a small model; this stirs the whole engine.
//! `make races` runs the tests of all crates with it.

use crate::random::Random;
use core::fmt;
use core::sync::atomic::Ordering;
use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

std::thread_local! {
    // Threads and processes start from different places.
    static STATE: Cell<u64> = Cell::new(RandomState::new().hash_one(0));
    static CHANGES: Cell<u64> = const { Cell::new(0) };
}

/// How many atomic read-modify-writes this thread has done: what the tables of costs say.
pub fn atomic_changes() -> u64 {
    CHANGES.try_with(Cell::get).unwrap_or(0)
}

/// Before such a one.
fn perturb_change() {
    let _ = CHANGES.try_with(|changes| changes.set(changes.get() + 1));
    perturb();
}

/// Now and then lets others run.
fn perturb() {
    // A thread that ends has no state any more.
    let _ = STATE.try_with(|state| {
        let mut random = Random(state.get());
        let now = random.word();
        state.set(random.0);
        if now % 512 == 0 {
            std::thread::sleep(Duration::from_micros(10 + (now >> 32) % 50));
        } else if now % 16 == 0 {
            std::thread::yield_now();
        }
    });
}

/// The operations that hugemm uses, with `core`'s names and meaning.
macro_rules! perturbed {
    ($name:ident, $value:ty, [$($rmw:ident),*]) => {
        perturbed!(impl [] $name, $value, core::sync::atomic::$name, [$($rmw),*]);
    };
    (exchange $value:ty, $exchange:ident) => {
        /// As `core`'s.
        ///
        /// # Errors
        ///
        /// The value that was found.
        pub fn $exchange(
            &self,
            current: $value,
            new: $value,
            success: Ordering,
            failure: Ordering,
        ) -> Result<$value, $value> {
            perturb_change();
            self.0.$exchange(current, new, success, failure)
        }
    };
    (impl [$($generic:ident)?] $name:ident, $value:ty, $core:ty, [$($rmw:ident),*]) => {
        #[doc = concat!("`core`'s `", stringify!($name), "`, perturbed.")]
        #[repr(transparent)]
        pub struct $name$(<$generic>)?($core);

        impl$(<$generic>)? $name$(<$generic>)? {
            /// As `core`'s.
            pub const fn new(value: $value) -> Self {
                Self(<$core>::new(value))
            }

            /// As `core`'s.
            pub fn get_mut(&mut self) -> &mut $value {
                self.0.get_mut()
            }

            /// As `core`'s.
            pub fn into_inner(self) -> $value {
                self.0.into_inner()
            }

            /// As `core`'s.
            pub fn load(&self, order: Ordering) -> $value {
                perturb();
                self.0.load(order)
            }

            /// As `core`'s.
            pub fn store(&self, value: $value, order: Ordering) {
                perturb();
                self.0.store(value, order)
            }

            perturbed!(exchange $value, compare_exchange);
            perturbed!(exchange $value, compare_exchange_weak);

            /// As `core`'s.
            ///
            /// # Errors
            ///
            /// The value for which `change` has no other.
            pub fn fetch_update(
                &self,
                success: Ordering,
                failure: Ordering,
                change: impl FnMut($value) -> Option<$value>,
            ) -> Result<$value, $value> {
                perturb_change();
                self.0.fetch_update(success, failure, change)
            }

            $(
                /// As `core`'s.
                pub fn $rmw(&self, value: $value, order: Ordering) -> $value {
                    perturb_change();
                    self.0.$rmw(value, order)
                }
            )*
        }

        impl$(<$generic>)? Default for $name$(<$generic>)? {
            fn default() -> Self {
                Self(<$core>::default())
            }
        }

        impl$(<$generic>)? fmt::Debug for $name$(<$generic>)? {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

perturbed!(AtomicU64, u64, [swap, fetch_add, fetch_sub, fetch_and, fetch_or, fetch_xor, fetch_max, fetch_min]);
perturbed!(AtomicU32, u32, [swap, fetch_add, fetch_sub, fetch_and, fetch_or]);
perturbed!(AtomicBool, bool, [swap, fetch_and, fetch_or]);
perturbed!(impl [T] AtomicPtr, *mut T, core::sync::atomic::AtomicPtr<T>, [swap]);

impl AtomicU64 {
    /// As `core`'s.
    pub const fn as_ptr(&self) -> *mut u64 {
        self.0.as_ptr()
    }

    /// As `core`'s.
    ///
    /// # Safety
    ///
    /// As `core`'s.
    pub const unsafe fn from_ptr<'a>(at: *mut u64) -> &'a Self {
        // SAFETY: the caller's promise; the layouts are the same.
        unsafe { &*at.cast::<Self>() }
    }
}
