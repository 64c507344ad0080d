//! `Notifier`: tells a thread that sleeps in `epoll` that there is something to fetch, at most once per fetch.
//!
//! ```text
//! notify:  flag := true; was it false? then write the eventfd       any thread; one swap, seldom a system call
//! clear:   read the eventfd; flag := false; now fetch               the thread that was woken
//! ```
//!
//! Both sides are wait-free: `write` to an eventfd that does not block returns at once. tokio's `Notify` would gain
//! nothing: it takes a lock while a task waits, and ends in a `write` to the runtime's own eventfd.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::atomic::{AtomicBool, Ordering},
};

use rustix::event::{EventfdFlags, eventfd};

/// See the module docs.
#[derive(Debug)]
pub struct Notifier {
    fd: OwnedFd,
    /// Whether the eventfd is readable and has not been cleared since.
    notified: AtomicBool,
}

impl Notifier {
    /// Make a notifier that is not notified.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { fd, notified: AtomicBool::new(false) })
    }

    /// Make the eventfd readable, at most once per `clear`. What was published before this call is visible after the
    /// `clear`.
    pub fn notify(&self) {
        // AcqRel: pairs with the swap in `clear`.
        if !self.notified.swap(true, Ordering::AcqRel) {
            // The counter cannot overflow: there is one write per clear.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }

    /// Reset the eventfd. A fetch after this call finds everything that was announced before it.
    pub fn clear(&self) {
        let mut count = [0u8; 8];
        // Read before clearing the flag: a write in between leaves the descriptor readable and costs one empty fetch.
        // The other way round, the read would swallow that write, and its news would never be announced. EAGAIN
        // (nothing was announced) is as good as a count.
        let _ = rustix::io::read(&self.fd, &mut count);
        // AcqRel: pairs with the swap in `notify`. If the other thread saw `true` and did not write, it had published
        // its news before this swap, and the fetch that follows sees them.
        self.notified.swap(false, Ordering::AcqRel);
    }
}

impl AsRawFd for Notifier {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::Notifier;

    fn is_readable(notifier: &Notifier) -> bool {
        let mut fds = [PollFd::new(notifier, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).expect("poll") == 1
    }

    #[test]
    fn one_clear_silences_any_number_of_calls() {
        let notifier = Notifier::new().expect("an eventfd");
        assert!(!is_readable(&notifier));
        (0..3).for_each(|_| notifier.notify());
        assert!(is_readable(&notifier));
        notifier.clear();
        assert!(!is_readable(&notifier));
        notifier.notify();
        assert!(is_readable(&notifier));
    }
}
