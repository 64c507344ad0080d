//! `Inbox`: passes messages from other threads to the scheduler's thread.
//!
//! A linked stack. A sender links its node with one compare-exchange (lock-free: a failed exchange means that another
//! sender succeeded). The receiver takes everything with one swap (wait-free) and reverses it into the order of
//! arrival. There is no ABA problem: nodes are never popped one by one. If the head that a sender has read leaves and
//! comes back at the same address before the exchange, linking to it is still right, because it *is* the head.
//!
//! ```text
//! push:  node.next = head;  CAS(head, next -> node)        head → n3 → n2 → n1
//! take:  swap(head, null), reverse                          yields n1, n2, n3
//! ```

use std::ptr;

use crate::sync::{AtomicPtr, Ordering};

struct Node<T> {
    value: T,
    next: *mut Node<T>,
}

/// Many senders, one receiver. Not limited by itself: a sender reserves its place in the queue beforehand.
#[derive(Debug)]
pub struct Inbox<T> {
    head: AtomicPtr<Node<T>>,
}

// SAFETY: nodes own their values and move between threads with them; the list is only reached
// through the atomic head. `T: Send` is all that a hand-over needs.
unsafe impl<T: Send> Send for Inbox<T> {}
// SAFETY: a shared reference allows pushing and taking whole values, never a shared `&T`, so `T: Send` is enough.
unsafe impl<T: Send> Sync for Inbox<T> {}

impl<T> Default for Inbox<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Inbox<T> {
    /// An empty inbox.
    #[must_use]
    pub fn new() -> Self {
        Self { head: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Add a message. Lock-free; allocates one node.
    pub fn push(&self, value: T) {
        let node = Box::into_raw(Box::new(Node { value, next: ptr::null_mut() }));
        // Relaxed: the value read here is only compared and stored, never dereferenced.
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            // SAFETY: `node` came from `Box::into_raw` above and is not published yet, so it is ours.
            unsafe { (*node).next = head };
            // Release: publishes the node's content to the Acquire swap in `take`. Every node below was
            // published by such a Release too, and a read-modify-write continues its release sequence.
            match self.head.compare_exchange_weak(head, node, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(current) => head = current,
            }
        }
    }

    /// Whether no message waits; a hint for parking, because the wake-up comes after the push.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.head.load(Ordering::Relaxed).is_null()
    }

    /// Take all messages, oldest first. Wait-free: one swap and a walk over the messages. It does not check for
    /// messages first: for that there is [`is_empty`](Self::is_empty), and with such a check the models below would
    /// never meet a sender.
    pub fn take(&self, mut receive: impl FnMut(T)) {
        // Acquire: pairs with the Release of every push whose node is in the list.
        let mut node = self.head.swap(ptr::null_mut(), Ordering::Acquire);
        let mut oldest_first: *mut Node<T> = ptr::null_mut();
        while !node.is_null() {
            // SAFETY: the swap made this thread the only one that can reach the list.
            let next = unsafe { (*node).next };
            // SAFETY: the swap made this thread the only one that can reach the node; it is re-linked in reverse.
            unsafe { (*node).next = oldest_first };
            oldest_first = node;
            node = next;
        }
        while !oldest_first.is_null() {
            // SAFETY: each node came from `Box::into_raw`, is reached once and owned by this thread.
            let owned = unsafe { Box::from_raw(oldest_first) };
            oldest_first = owned.next;
            receive(owned.value);
        }
    }
}

impl<T> Drop for Inbox<T> {
    fn drop(&mut self) {
        self.take(drop);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::Inbox;

    #[test]
    fn messages_arrive_once_in_each_senders_order() {
        let inbox = Inbox::new();
        let mut received = Vec::new();
        std::thread::scope(|scope| {
            for sender in 0..4u64 {
                let inbox = &inbox;
                scope.spawn(move || (0..10_000u64).for_each(|i| inbox.push((sender, i))));
            }
            while received.len() < 40_000 {
                inbox.take(|message| received.push(message));
            }
        });
        for sender in 0..4 {
            let own: Vec<u64> = received.iter().filter(|m| m.0 == sender).map(|m| m.1).collect();
            assert!(own.iter().copied().eq(0..10_000), "sender {sender} out of order");
        }
    }

    #[test]
    fn what_was_not_taken_is_dropped_once() {
        let token = std::sync::Arc::new(());
        let inbox = Inbox::new();
        (0..10).for_each(|_| inbox.push(token.clone()));
        drop(inbox);
        assert_eq!(std::sync::Arc::strong_count(&token), 1);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::{sync::Arc, thread};

    use super::Inbox;

    /// Two senders and a receiver that takes while they push: nothing is lost, doubled or out of order.
    #[test]
    fn no_message_is_lost_or_doubled() {
        loom::model(|| {
            let inbox = Arc::new(Inbox::new());
            let senders: Vec<_> = (0..2)
                .map(|sender| {
                    let inbox = inbox.clone();
                    thread::spawn(move || (0..2).for_each(|i| inbox.push((sender, i))))
                })
                .collect();
            let mut received = Vec::new();
            inbox.take(|message| received.push(message));
            for sender in senders {
                sender.join().unwrap();
            }
            inbox.take(|message| received.push(message));
            for sender in 0..2 {
                let own: Vec<i32> = received.iter().filter(|m| m.0 == sender).map(|m| m.1).collect();
                assert_eq!(own, [0, 1]);
            }
        });
    }

    /// The value behind a message is whole when it is received: loom checks the non-atomic access too.
    #[test]
    fn a_message_is_whole_when_it_is_seen() {
        loom::model(|| {
            let inbox = Arc::new(Inbox::new());
            let sender = {
                let inbox = inbox.clone();
                thread::spawn(move || inbox.push(loom::cell::UnsafeCell::new(7)))
            };
            inbox.take(|cell| {
                // SAFETY: received by value: no other thread has the cell.
                cell.with(|value| assert_eq!(unsafe { *value }, 7));
            });
            sender.join().unwrap();
        });
    }
}
