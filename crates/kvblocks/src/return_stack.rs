//! The return stack: lets a thread other than the owner give back a reference.
//!
//! ```text
//!  head ──▶ 7 ──▶ 3 ──▶ 12 ──▶ 0 (end)        links[b] = { next, owed }
//! ```
//!
//! An intrusive stack over block numbers, as long as the pool: pushing allocates nothing and cannot find it full. A
//! block is in the stack at most once, however many references are given back: `owed` counts them, and only the thread
//! that raises it from zero pushes. The owner takes the whole stack with one swap and never pops a single entry. This
//! makes it immune to ABA: a push compares `head` only with the value that it wrote as its own `next`, so it does not
//! matter what happened to `head` in between.
//!
//! Progress: [`push`](ReturnStack::push) is lock-free (its retry means that another push succeeded), and wait-free if
//! the block is owed already; [`take`](ReturnStack::take) and [`next`](ReturnStack::next) are wait-free, bounded by the
//! number of blocks. No thread waits for another. If a thread stalls between its count and its push, further references
//! to *the same block* are counted but not drained yet; they arrive with its push.

use crate::block::BlockId;
use crate::sync::{AtomicU32, Ordering};

/// No block: the null block is never handed back, so its number marks the end.
const END: u32 = 0;

/// More references to one block than can be real: reaching it is a bug in the caller, found long before a wrap.
const OWED_LIMIT: u32 = 1 << 31;

struct Link {
    /// The entry below this one. Written by the thread that pushes the block, then by the owner while it drains.
    next: AtomicU32,
    /// References given back and not yet drained. Above zero: the block is in the stack, or on its way.
    owed: AtomicU32,
}

/// On a cache line of its own: other threads write it while the owner works.
#[repr(align(64))]
struct Head(AtomicU32);

/// A chain that the owner has taken off the stack. Dropping it before it is read completely would lose the rest.
#[must_use]
pub(crate) struct Returned {
    first: u32,
}

pub(crate) struct ReturnStack {
    head: Head,
    links: Box<[Link]>,
}

impl ReturnStack {
    pub(crate) fn new(num_blocks: u32) -> Self {
        let link = |_| Link { next: AtomicU32::new(END), owed: AtomicU32::new(0) };
        Self { head: Head(AtomicU32::new(END)), links: (0..num_blocks).map(link).collect() }
    }

    /// Give back one reference to `block`.
    pub(crate) fn push(&self, block: BlockId) {
        assert!(
            !block.is_null() && block.index() < self.links.len(),
            "hand_back of {block}: not a usable block of this pool of {}",
            self.links.len()
        );
        let link = &self.links[block.index()];
        // AcqRel. Release: what this thread did with the block comes before the owner's `owed.swap` in `next`.
        // Acquire: partner of that swap; when it has set the count to 0, the owner has read `next`, and it is ours. (A
        // load that overtakes is what this pair forbids; loom runs loads in program order and cannot show it.)
        let owed = link.owed.fetch_add(1, Ordering::AcqRel);
        assert!(owed < OWED_LIMIT, "hand_back of {block}: {owed} references are waiting already");
        if owed > 0 {
            return;
        }
        let mut top = self.head.0.load(Ordering::Relaxed);
        loop {
            link.next.store(top, Ordering::Relaxed);
            // Release: `next` is written before the owner's `head.swap` in `take` sees the block. A later push
            // continues this release sequence, so the swap also synchronises with every push below the top.
            match self.head.0.compare_exchange_weak(top, block.0, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => top = now,
            }
        }
    }

    /// Owner: take everything that has arrived. Read all of it with [`next`](Self::next).
    pub(crate) fn take(&self) -> Returned {
        // Acquire: partner of the Release in `push`; `next` of every entry of the chain is visible.
        let mut top = self.head.0.swap(END, Ordering::Acquire);
        // Reverse the chain. All its blocks are still owed, so no thread touches their `next`.
        let mut first = END;
        while top != END {
            let next = &self.links[top as usize].next;
            let below = next.load(Ordering::Relaxed);
            next.store(first, Ordering::Relaxed);
            first = top;
            top = below;
        }
        Returned { first }
    }

    /// Owner: the next block of a chain that was taken, in the order of arrival, and how many references came back.
    pub(crate) fn next(&self, returned: &mut Returned) -> Option<(BlockId, u32)> {
        let block = returned.first;
        if block == END {
            return None;
        }
        let link = &self.links[block as usize];
        // Read before the count goes to 0: after that another thread may push the block again.
        returned.first = link.next.load(Ordering::Relaxed);
        // AcqRel: partner of `fetch_add` in `push`, both ways (see there).
        Some((BlockId(block), link.owed.swap(0, Ordering::AcqRel)))
    }
}
