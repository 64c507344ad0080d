//! Memory in whole cache lines, in large pages where the system has them: what packed weights and activations lie in.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
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
unsafe impl Plain for u8 {}
// SAFETY: every bit pattern is a number of this type, and it is aligned to at most eight bytes.
unsafe impl Plain for u64 {}

/// Zeros at first.
#[derive(Debug)]
pub(crate) struct Lines {
    start: NonNull<u8>,
    layout: Layout,
    /// Where the mapping that they lie in begins, and its bytes; None: they are the allocator's.
    mapping: Option<(NonNull<u8>, usize)>,
}

// SAFETY: it owns its memory, like a vector of bytes.
unsafe impl Send for Lines {}
// SAFETY: it is written through `&mut` alone.
unsafe impl Sync for Lines {}

impl Lines {
    /// None when there is not as much memory.
    pub(crate) fn new(num_bytes: usize) -> Option<Self> {
        let size = num_bytes.max(1).checked_next_multiple_of(LINE)?;
        if cfg!(target_os = "linux") && num_bytes >= LARGE_PAGE {
            return Self::mapped(size);
        }
        let layout = Layout::from_size_align(size, LINE).ok()?;
        // SAFETY: the size is not 0.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { start, layout, mapping: None })
    }

    /// Pages that nothing is written to here: the threads that write first, perhaps several at once, have the system make
    /// them, near their own processor where a machine has several.
    #[cfg(target_os = "linux")]
    fn mapped(size: usize) -> Option<Self> {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
        let layout = Layout::from_size_align(size, LARGE_PAGE).ok()?;
        let length = size.checked_add(LARGE_PAGE)?; // a mapping begins at any small page
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the memory is new, at a place that the system chooses.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), length, access, MapFlags::PRIVATE) }.ok()?;
        let base = NonNull::new(base.cast::<u8>())?;
        // SAFETY: the next large page begins within the mapping, and as many bytes as are asked for lie behind that.
        let start = unsafe { base.add(base.align_offset(LARGE_PAGE)) };
        // Whole pages alone: a large page under the rest would take memory that is never used. A system that has no large
        // pages gives small ones, which are slower and no worse.
        // SAFETY: the memory is this mapping's, and how it is paged changes nothing in it.
        let _ =
            unsafe { madvise(start.as_ptr().cast(), size / LARGE_PAGE * LARGE_PAGE, Advice::LinuxHugepage) };
        Some(Self { start, layout, mapping: Some((base, length)) })
    }

    #[cfg(not(target_os = "linux"))]
    fn mapped(_size: usize) -> Option<Self> {
        None
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
        match self.mapping {
            #[cfg(target_os = "linux")]
            Some((base, length)) => {
                // SAFETY: it was mapped with this length, and nothing refers to it any more. It cannot fail for a mapping that
                // is there.
                let _ = unsafe { rustix::mm::munmap(base.as_ptr().cast(), length) };
            }
            // SAFETY: it was allocated with this layout.
            _ => unsafe { dealloc(self.start.as_ptr(), self.layout) },
        }
    }
}
