//! The threads of a process that share out attention and products: one call at a time, the caller working too.
//!
//! Between two products of a step lie a few microseconds, between two steps some hundred, and waking a thread takes as long. A
//! helper therefore looks out for the next call for a little while ([`DEFAULT_SPIN`]) before it sleeps. Nothing looks out
//! while there is nothing to do, and who finds the threads taken by another caller works alone rather than wait.
//!
//! A caller may announce what the next call reads ([`Threads::announce`]): threads that wait have it brought near meanwhile.

pub(crate) mod ahead;

use std::{
    cell::UnsafeCell,
    fmt, io,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use crate::threads::ahead::{Ahead, Announced, Reader};

/// How long a helper looks out for the next call before it sleeps: longer than what lies between the last product of a step and
/// the first of the next.
pub const DEFAULT_SPIN: Duration = Duration::from_micros(500);
/// How long a caller looks out for the last part of a helper before it sleeps.
const CALLER_SPIN: Duration = Duration::from_micros(200);
/// Looks between two looks at the clock.
const LOOKS: u32 = 32;
/// How often a caller asks for what comes next when a call is over: what it does until then waits no longer for that.
const CALLER_ASKS: usize = 8;

/// The calling thread and its helpers.
#[derive(Debug)]
pub struct Threads {
    /// None: the caller works alone.
    helpers: Option<Helpers>,
}

impl Threads {
    /// The caller and `num_threads − 1` helpers; at least the caller.
    ///
    /// # Errors
    ///
    /// The system starts no more threads.
    pub fn new(num_threads: usize) -> io::Result<Self> {
        Self::with_spin(num_threads, DEFAULT_SPIN)
    }

    /// The caller and `num_threads − 1` helpers, which look out for work for `spin` before they sleep.
    ///
    /// # Errors
    ///
    /// The system starts no more threads.
    pub fn with_spin(num_threads: usize, spin: Duration) -> io::Result<Self> {
        let helpers = match num_threads.saturating_sub(1) {
            0 => None,
            helpers => Some(Helpers::start(helpers, spin)?),
        };
        Ok(Self { helpers })
    }

    /// The caller, and no helper.
    #[must_use]
    pub const fn alone() -> Self {
        Self { helpers: None }
    }

    /// How many threads work, the caller included.
    #[must_use]
    pub fn num_threads(&self) -> usize {
        1 + self.helpers.as_ref().map_or(0, |helpers| helpers.handles.len())
    }

    /// Say what the call after the next one reads, as parts in its order; None if that is not known. Each thread that waits for
    /// that call asks for the beginning of its own stretch.
    pub(crate) fn announce(&self, ahead: Option<Ahead>) {
        if let Some(helpers) = &self.helpers {
            helpers.shared.announced.set(ahead);
        }
    }

    /// Call `work` for 0 up to `num_parts`, each once, in no order and on any thread; alone when not `shared`.
    ///
    /// Each thread begins with a stretch of its own, the same in every call of as many parts, and then helps the others:
    /// what it read in the last step may still be near. When the helpers are slow to wake the caller may be done before
    /// they begin.
    pub(crate) fn for_each(&self, num_parts: usize, shared: bool, work: impl Fn(usize) + Sync) {
        let Some(helpers) = self.helpers.as_ref().filter(|_| shared && num_parts > 1) else {
            return (0..num_parts).for_each(work);
        };
        let Some(call) = helpers.take() else {
            return (0..num_parts).for_each(work);
        };
        let num_threads = self.num_threads();
        let end = |thread: usize| num_parts * (thread + 1) / num_threads;
        for (thread, next) in helpers.shared.next.iter().enumerate() {
            // Relaxed: published with the call.
            next.0.store(num_parts * thread / num_threads, Ordering::Relaxed);
        }
        let next = &helpers.shared.next;
        call.run(&|thread: usize| {
            for owner in (thread..num_threads).chain(0..thread) {
                loop {
                    // Relaxed: the number is all that is taken; what was done is seen when the call ends.
                    let part = next[owner].0.fetch_add(1, Ordering::Relaxed);
                    if part >= end(owner) {
                        break;
                    }
                    work(part);
                }
            }
        });
    }
}

/// A counter in a place of its own, so that threads counting on their own do not disturb each other.
#[repr(align(128))]
#[derive(Default)]
struct Next(AtomicUsize);

/// What a call asks of each thread, with the thread's number.
type Work<'a> = dyn Fn(usize) + Sync + 'a;

/// Set in [`Shared::state`] while helpers may join.
const OPEN: u64 = 1 << 31;
/// Set when the helpers are to end.
const END: u64 = 1 << 30;
/// How many helpers have joined.
const JOINED: u64 = END - 1;
/// One call further.
const CALL: u64 = 1 << 32;

struct Shared {
    /// Number of the call, [`OPEN`], [`END`], and how many helpers have joined it.
    state: AtomicU64,
    /// Helpers that have done what they joined for.
    done: AtomicUsize,
    /// The work of the call; written while no thread may join and all that had joined are done.
    work: UnsafeCell<Option<&'static Work<'static>>>,
    /// One per thread: the next part of its stretch.
    next: Vec<Next>,
    /// Some helper's work panicked.
    panicked: AtomicBool,
    num_sleeping: AtomicUsize,
    caller_sleeps: AtomicBool,
    /// What the call after this one reads.
    announced: Announced,
    /// Held while going to sleep and while waking.
    sleep: Mutex<()>,
    helpers_wake: Condvar,
    caller_wakes: Condvar,
}

// SAFETY: `work` is the one field that is not `Sync`. It is written by the thread that holds `Helpers::caller`, while the
// call is closed and all joined helpers are done, and read by helpers that have joined an open call.
unsafe impl Sync for Shared {}
// SAFETY: `work` is the one field that is not `Send`: it points at a function that is `Sync`, alive while a call is open.
unsafe impl Send for Shared {}

struct Helpers {
    shared: Arc<Shared>,
    /// Held by the one caller whose call it is.
    caller: Mutex<()>,
    handles: Vec<JoinHandle<()>>,
}

impl fmt::Debug for Helpers {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Helpers").field("num_helpers", &self.handles.len()).finish_non_exhaustive()
    }
}

impl Helpers {
    fn start(num_helpers: usize, spin: Duration) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            done: AtomicUsize::new(0),
            work: UnsafeCell::new(None),
            next: (0..=num_helpers).map(|_| Next::default()).collect(),
            panicked: AtomicBool::new(false),
            num_sleeping: AtomicUsize::new(0),
            caller_sleeps: AtomicBool::new(false),
            announced: Announced::default(),
            sleep: Mutex::new(()),
            helpers_wake: Condvar::new(),
            caller_wakes: Condvar::new(),
        });
        let mut helpers = Self { shared, caller: Mutex::new(()), handles: Vec::new() };
        for thread in 1..=num_helpers {
            let shared = Arc::clone(&helpers.shared);
            let builder = std::thread::Builder::new().name(format!("cpu-kernels-{thread}"));
            helpers.handles.push(builder.spawn(move || shared.help(thread, spin))?);
        }
        Ok(helpers)
    }

    /// The right to call; None while another thread has it.
    fn take(&self) -> Option<Call<'_>> {
        let turn = match self.caller.try_lock() {
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(Call { shared: &self.shared, _turn: turn })
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        // SeqCst: as in `Call::run`, so that no helper misses it on its way to sleep.
        self.shared.state.fetch_or(END, Ordering::SeqCst);
        self.shared.wake_helpers();
        for handle in self.handles.drain(..) {
            // A helper catches the panics of its work.
            let _ = handle.join();
        }
    }
}

struct Call<'a> {
    shared: &'a Shared,
    _turn: MutexGuard<'a, ()>,
}

impl Call<'_> {
    /// Let every thread do `work`; back when all that began are done.
    fn run(self, work: &Work<'_>) {
        let shared = self.shared;
        // SAFETY: only the lifetime changes; `close` below returns when no helper uses it any more.
        let work_for_helpers = unsafe { std::mem::transmute::<&Work<'_>, &'static Work<'static>>(work) };
        // SAFETY: the last call is closed and its helpers are done, see `close`; `_turn` keeps other callers away.
        unsafe { *shared.work.get() = Some(work_for_helpers) };
        shared.done.store(0, Ordering::Relaxed);
        let last = shared.state.load(Ordering::Relaxed);
        let opened = (last & !(CALL - 1)).wrapping_add(CALL) | OPEN;
        // SeqCst: publishes the work to the AcqRel of `join`, and is ordered before the look at `num_sleeping`: either that
        // shows the helper, or the helper sees the call before it sleeps.
        shared.state.store(opened, Ordering::SeqCst);
        shared.wake_helpers();
        let mine = catch_unwind(AssertUnwindSafe(|| work(0)));
        shared.close();
        let panicked = shared.panicked.swap(false, Ordering::Relaxed);
        if let Err(panic) = mine {
            resume_unwind(panic);
        }
        assert!(!panicked, "a thread that shared the work panicked; its message is on stderr");
    }
}

impl Shared {
    fn wake_helpers(&self) {
        // SeqCst: see `Call::run`.
        if self.num_sleeping.load(Ordering::SeqCst) > 0 {
            drop(self.sleep.lock().unwrap_or_else(PoisonError::into_inner));
            self.helpers_wake.notify_all();
        }
    }

    /// No thread joins any more, and all that did are done.
    fn close(&self) {
        // AcqRel: after it no `join` succeeds, and how many had is known.
        let joined = (self.state.fetch_and(!OPEN, Ordering::AcqRel) & JOINED) as usize;
        // Acquire: what the helpers wrote, released by their last `fetch_add` on `done`.
        let is_done = || self.done.load(Ordering::Acquire) == joined;
        let mut reader = Reader::new(0, self.next.len());
        reader.look(&self.announced);
        if spin_until(CALLER_SPIN, || is_done() || (reader.ask() && is_done())) {
            for _ in 0..CALLER_ASKS {
                reader.ask();
            }
            return;
        }
        // SeqCst: either the helper sees it, or this thread sees below that the helper is done.
        self.caller_sleeps.store(true, Ordering::SeqCst);
        let mut guard = self.sleep.lock().unwrap_or_else(PoisonError::into_inner);
        // SeqCst: as above.
        while self.done.load(Ordering::SeqCst) != joined {
            guard = self.caller_wakes.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.caller_sleeps.store(false, Ordering::Relaxed);
    }

    /// The life of a helper.
    fn help(&self, thread: usize, spin: Duration) {
        let mut seen = 0;
        let mut reader = Reader::new(thread, self.next.len());
        loop {
            let is_called = || {
                // SeqCst: see `Call::run`.
                let state = self.state.load(Ordering::SeqCst);
                state & END != 0 || (state & OPEN != 0 && state / CALL != seen)
            };
            reader.look(&self.announced);
            while !is_called() && reader.ask() {}
            if !spin_until(spin, is_called) {
                // SeqCst: ordered before the look at the state, see `Call::run`.
                self.num_sleeping.fetch_add(1, Ordering::SeqCst);
                let mut guard = self.sleep.lock().unwrap_or_else(PoisonError::into_inner);
                while !is_called() {
                    guard = self.helpers_wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
                }
                drop(guard);
                self.num_sleeping.fetch_sub(1, Ordering::Relaxed);
            }
            let state = self.state.load(Ordering::Relaxed);
            if state & END != 0 {
                return;
            }
            if state & OPEN == 0 || state / CALL == seen {
                continue;
            }
            // AcqRel: the work was published before the call opened; `close` sees that this helper joined.
            let joined =
                self.state.compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
            if !joined {
                continue;
            }
            seen = state / CALL;
            // SAFETY: the call is open and this helper has joined it, so no thread writes `work` before it is done.
            if let Some(work) = unsafe { *self.work.get() }
                && catch_unwind(AssertUnwindSafe(|| work(thread))).is_err()
            {
                self.panicked.store(true, Ordering::Relaxed);
            }
            // SeqCst: releases what was written to the loads in `close`, and is ordered before the look at the caller.
            self.done.fetch_add(1, Ordering::SeqCst);
            // SeqCst: see `close`.
            if self.caller_sleeps.load(Ordering::SeqCst) {
                drop(self.sleep.lock().unwrap_or_else(PoisonError::into_inner));
                self.caller_wakes.notify_all();
            }
        }
    }
}

/// Look until `is_true` or the time is up; whether it is true.
fn spin_until(time: Duration, mut is_true: impl FnMut() -> bool) -> bool {
    if is_true() {
        return true;
    }
    let start = Instant::now();
    loop {
        for _ in 0..LOOKS {
            std::hint::spin_loop();
            if is_true() {
                return true;
            }
        }
        if start.elapsed() >= time {
            return is_true();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often each part was done.
    fn done(threads: &Threads, num_parts: usize) -> Vec<usize> {
        let counts: Vec<AtomicUsize> = (0..num_parts).map(|_| AtomicUsize::new(0)).collect();
        threads.for_each(num_parts, true, |part| {
            counts[part].fetch_add(1, Ordering::Relaxed);
        });
        counts.into_iter().map(AtomicUsize::into_inner).collect()
    }

    /// Helpers that look out, that sleep at once, and that fall asleep between two calls.
    #[test]
    fn every_part_is_done_once() {
        for spin in [Duration::ZERO, Duration::from_micros(20), Duration::from_millis(5)] {
            for num_threads in 1..=4 {
                let threads = Threads::with_spin(num_threads, spin).expect("threads");
                assert_eq!(threads.num_threads(), num_threads);
                for call in 0..300 {
                    let num_parts = call % 37;
                    assert_eq!(done(&threads, num_parts), vec![1; num_parts]);
                }
            }
        }
    }

    /// Which thread did each part, when every thread is in its first part before any goes on.
    fn who_did(
        threads: &Threads,
        num_parts: usize,
        work: impl Fn(usize) + Sync,
    ) -> Vec<std::thread::ThreadId> {
        let all_began = std::sync::Barrier::new(threads.num_threads());
        let did = Mutex::new(vec![None; num_parts]);
        threads.for_each(num_parts, true, |part| {
            let me = std::thread::current().id();
            let is_first = {
                let mut did = did.lock().unwrap_or_else(PoisonError::into_inner);
                let is_first = !did.contains(&Some(me));
                did[part] = Some(me);
                is_first
            };
            if is_first {
                all_began.wait();
            }
            work(part);
        });
        did.into_inner()
            .unwrap_or_else(PoisonError::into_inner)
            .into_iter()
            .map(|who| who.expect("done"))
            .collect()
    }

    #[test]
    fn each_thread_begins_with_a_stretch_of_its_own() {
        for num_threads in [2, 3, 5, 8] {
            let threads = Threads::new(num_threads).expect("threads start");
            for num_parts in [num_threads, 2 * num_threads + 1, 97] {
                let who = who_did(&threads, num_parts, |_| {});
                // The first part of each stretch is done by a thread of its own; stretches differ by a part at most.
                let firsts: Vec<usize> =
                    (0..num_threads).map(|thread| num_parts * thread / num_threads).collect();
                let owners: std::collections::HashSet<_> = firsts.iter().map(|&first| who[first]).collect();
                assert_eq!(owners.len(), num_threads, "{num_threads} threads, {num_parts} parts");
                let ends = firsts.iter().skip(1).chain([&num_parts]);
                let lens: Vec<usize> = firsts.iter().zip(ends).map(|(first, end)| end - first).collect();
                assert!(lens.iter().max() <= lens.iter().min().map(|len| len + 1).as_ref(), "{lens:?}");
            }
        }
    }

    #[test]
    fn what_a_slow_thread_has_not_begun_is_done_by_others() {
        const NUM_PARTS: usize = 40;
        let threads = Threads::new(4).expect("threads start");
        let num_done = AtomicUsize::new(0);
        let who = who_did(&threads, NUM_PARTS, |part| {
            // The thread of the last stretch comes back when all parts but its own first one are done.
            if part == 30 {
                while num_done.load(Ordering::Acquire) < NUM_PARTS - 1 {
                    std::thread::yield_now();
                }
            }
            num_done.fetch_add(1, Ordering::AcqRel);
        });
        assert_eq!(who.iter().filter(|&&one| one == who[30]).count(), 1);
    }

    #[test]
    fn callers_at_the_same_time_each_get_their_own() {
        let threads = Threads::with_spin(3, Duration::from_micros(20)).expect("threads");
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for call in 0..500 {
                        assert_eq!(done(&threads, call % 19), vec![1; call % 19]);
                    }
                });
            }
        });
    }

    /// What helpers write is seen after the call, and helpers see what was written before it.
    #[test]
    fn a_call_sees_what_the_last_one_wrote() {
        let threads = Threads::new(3).expect("threads");
        let cells: Vec<AtomicUsize> = (0..8).map(|_| AtomicUsize::new(0)).collect();
        for call in 0..2000 {
            threads.for_each(8, true, |part| {
                // Relaxed: the calls order it.
                assert_eq!(cells[(part + 1) % 8].load(Ordering::Relaxed) / 2, call);
                if part % 2 == 1 {
                    std::thread::yield_now();
                }
            });
            threads.for_each(8, true, |part| {
                cells[part].fetch_add(2, Ordering::Relaxed);
            });
        }
    }

    #[test]
    fn a_panic_of_any_part_reaches_the_caller_and_harms_no_other_call() {
        let threads = Threads::new(3).expect("threads");
        for bad in 0..9 {
            let call = || threads.for_each(9, true, |part| assert_ne!(part, bad, "on purpose"));
            assert!(catch_unwind(AssertUnwindSafe(call)).is_err());
            assert_eq!(done(&threads, 9), vec![1; 9]);
        }
    }
}
