//! Following a space, and telling its followers.

use crate::address_space::AddressSpace;
use crate::error::VmError;
use crate::notifier::{ByOrder, Node, Notifier};
use crate::setup::{Cx, Setup};
use crate::vm::Vm;
use core::ptr::NonNull;
use hugemm_base::VirtRange;
use hugemm_base::sync::Ordering;
use intrusive_collections::{LinkedList, UnsafeRef};

/// A notifier's place; to be given back with [`Vm::unfollow`].
#[derive(Debug)]
#[must_use = "the notifier stays until it is given to `unfollow`"]
pub struct Follower<S: Setup>(NonNull<Node<S::Notifier>>);

// SAFETY: it is the right to remove the node, which any task may do.
unsafe impl<S: Setup> Send for Follower<S> where S::Notifier: Send {}

/// A change under way. Whoever was told of its beginning is told of its end, whether it comes by returning or by unwinding.
struct UnderWay<'a, 'p, S: Setup> {
    space: &'a AddressSpace<S>,
    cx: &'a mut Cx<'p, S>,
    range: VirtRange,
    /// How many followers know, from the first on: the list stays as it is meanwhile.
    told: usize,
}

impl<S: Setup> Drop for UnderWay<'_, '_, S> {
    fn drop(&mut self) {
        let whole = Whole;
        let followers = self.space.followers().shared();
        followers.list.iter().take(self.told).for_each(|node| node.notifier.end(self.cx, self.range));
        followers.under_way.fetch_sub(1, Ordering::Relaxed);
        core::mem::forget(whole);
    }
}

/// Forgotten when all followers have been told of an end. If one of them unwinds instead, this panics once more, which ends the program:
/// what was unmapped would be blocked for ever, and its areas would be found where they are no longer.
struct Whole;

impl Drop for Whole {
    fn drop(&mut self) {
        panic!("a change was left by unwinding: `Notifier::end` must not panic");
    }
}

impl<S: Setup> AddressSpace<S> {
    /// Whether anybody follows the space.
    pub(crate) fn is_followed(&self) -> bool {
        // Acquire pairs with the Release in `between_changes`.
        self.followed.load(Ordering::Acquire)
    }

    /// Ages a range in all followers; whether one has used it.
    pub(crate) fn followers_age(&self, range: VirtRange) -> bool {
        self.followers().shared().list.iter().fold(false, |young, node| node.notifier.young(range) | young)
    }

    /// Makes a change in a range, telling all followers before and after.
    pub(crate) fn changing<'p, R>(
        &self,
        cx: &mut Cx<'p, S>,
        range: VirtRange,
        change: impl FnOnce(&mut Cx<'p, S>) -> R,
    ) -> R {
        let mut under_way = UnderWay { space: self, cx, range, told: 0 };
        {
            let followers = self.followers().shared();
            // Relaxed: read under the exclusive lock only.
            followers.under_way.fetch_add(1, Ordering::Relaxed);
            for node in followers.list.iter() {
                under_way.told += 1;
                node.notifier.begin(under_way.cx, range);
            }
        }
        change(under_way.cx)
    }
}

impl<S: Setup> Vm<'_, S>
where
    S::Notifier: Send + Sync,
{
    /// Has a notifier told of everything that changes in the space from here on. One allocation.
    ///
    /// # Errors
    ///
    /// [`NoMemory`](VmError::NoMemory), [`Foreign`](VmError::Foreign).
    pub fn follow(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        notifier: S::Notifier,
    ) -> Result<Follower<S>, VmError> {
        self.check_own(space)?;
        let node = Node::new(notifier);
        let node = self.keep(cx, node)?;
        self.between_changes(cx, space, |list| {
            // SAFETY: the node lives until `unfollow`, which takes it off the list first.
            list.push_back(unsafe { UnsafeRef::from_raw(node.as_ptr()) });
        });
        Ok(Follower(node))
    }

    /// Ends that. `follower` came from [`follow`](Vm::follow) on this space.
    ///
    /// # Safety
    ///
    /// It did.
    pub unsafe fn unfollow(&self, cx: &mut Cx<'_, S>, space: &AddressSpace<S>, follower: Follower<S>) -> S::Notifier {
        self.between_changes(cx, space, |list| {
            // SAFETY: the caller's promise: the node is on this list.
            unsafe { list.cursor_mut_from_ptr(follower.0.as_ptr()) }.remove();
        });
        // SAFETY: made by `follow`, and off the list.
        unsafe { self.take_back(cx, follower.0) }.notifier
    }

    /// Changes the list while nothing is under way, so that everybody is told of ends whose beginnings it was told of, and
    /// of no others.
    fn between_changes(
        &self,
        cx: &mut Cx<'_, S>,
        space: &AddressSpace<S>,
        change: impl FnOnce(&mut LinkedList<ByOrder<S::Notifier>>),
    ) {
        loop {
            {
                let mut followers = space.followers().exclusive();
                // Relaxed: ordered by the lock.
                if followers.under_way.load(Ordering::Relaxed) == 0 {
                    change(&mut followers.list);
                    // Release pairs with the Acquire in `is_followed`.
                    return space.followed.store(!followers.list.is_empty(), Ordering::Release);
                }
            }
            self.cond_resched(cx);
        }
    }
}
