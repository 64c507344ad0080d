//! Memory in whole cache lines, in large pages where the system has them: what packed weights and activations lie in.

use std::{
    alloc::{Layout, alloc, dealloc},
    ptr::NonNull,
};

/// Bytes of a line, as most machines have it; a vector of AVX-512 is one.
const LINE: usize = 64;
/// Bytes of a large page.
const LARGE_PAGE: usize = 2 << 20;

/// Plain numbers that any bits are a value of.
///
/// # Safety
///
/// All bits are valid, zeros included, and the alignment is at most that of a line.
pub(crate) unsafe trait Plain: Copy + Send {}
// SAFETY: every bit pattern is a number of this type, and it is aligned to at most eight bytes.
unsafe impl Plain for f32 {}
// SAFETY: every bit pattern is a number of this type, and it is aligned to at most eight bytes.
unsafe impl Plain for u16 {}
// SAFETY: every bit pattern is a number of this type, and it is aligned to at most eight bytes.
unsafe impl Plain for half::bf16 {}
// SAFETY: every bit pattern is a number of this type, and it is aligned to at most eight bytes.
unsafe impl Plain for i8 {}
// SAFETY: every bit pattern is a number of this type, and it is aligned to at most eight bytes.
unsafe impl Plain for u64 {}

/// Zeros at first.
#[derive(Debug)]
pub(crate) struct Lines {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns its memory, like a vector of bytes.
unsafe impl Send for Lines {}
// SAFETY: it is written through `&mut` alone.
unsafe impl Sync for Lines {}

impl Lines {
    /// None when there is not as much memory.
    pub(crate) fn new(num_bytes: usize) -> Option<Self> {
        let align = if num_bytes >= LARGE_PAGE { LARGE_PAGE } else { LINE };
        let layout = Layout::from_size_align(num_bytes.max(1).checked_next_multiple_of(LINE)?, align).ok()?;
        // SAFETY: the size is not 0.
        let start = NonNull::new(unsafe { alloc(layout) })?;
        #[cfg(target_os = "linux")]
        if layout.align() == LARGE_PAGE {
            use rustix::mm::{Advice, madvise};
            // Before the memory is touched. A system that has no large pages gives small ones, which are slower and no worse.
            // Whole ones alone: a large page under the rest would take memory that is never used.
            let whole = layout.size() / LARGE_PAGE * LARGE_PAGE;
            // SAFETY: the memory is this allocation's, and how it is paged changes nothing in it.
            let _ = unsafe { madvise(start.as_ptr().cast(), whole, Advice::LinuxHugepage) };
        }
        // SAFETY: the allocation has as many bytes.
        unsafe { start.as_ptr().write_bytes(0, layout.size()) };
        Some(Self { start, layout })
    }

    /// At least as many bytes: those of `room`, or new ones in their place.
    pub(crate) fn at_least(num_bytes: usize, room: &mut Option<Self>) -> Option<&mut Self> {
        if room.as_ref().is_none_or(|lines| lines.num_bytes() < num_bytes) {
            *room = None;
            *room = Some(Self::new(num_bytes)?);
        }
        room.as_mut()
    }

    pub(crate) fn num_bytes(&self) -> usize {
        self.layout.size()
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr()
    }

    pub(crate) fn as_slice<T: Plain>(&self) -> &[T] {
        // SAFETY: the memory is initialised, aligned to a line at least, and `T` takes any bits.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.layout.size() / size_of::<T>()) }
    }

    pub(crate) fn as_mut_slice<T: Plain>(&mut self) -> &mut [T] {
        // SAFETY: the memory is initialised, aligned to a line at least, and `T` takes any bits; `&mut self` is the only
        // reference to it.
        unsafe {
            std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), self.layout.size() / size_of::<T>())
        }
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}
