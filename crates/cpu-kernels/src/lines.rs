//! Memory in whole cache lines, in large pages where the system has them: what packed weights and activations lie in.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ptr::NonNull,
    sync::{Arc, Mutex, PoisonError, Weak},
};

/// Bytes of a line, as most machines have it; a vector of AVX-512 is one.
pub(crate) const LINE: usize = 64;
/// Bytes of a large page.
const LARGE_PAGE: usize = 2 << 20;
/// Bytes of a mapping that many share.
const CHUNK: usize = 64 << 20;

/// Have bytes that are read soon brought into the second cache, on processors that take such a hint. Any address will do.
#[inline]
pub(crate) fn ask_for(from: *const u8, num_bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..num_bytes).step_by(LINE) {
        // SAFETY: a prefetch reads nothing and takes any address; every x86_64 processor has it.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(
                from.wrapping_add(line).cast(),
            );
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, num_bytes);
}

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
unsafe impl Plain for u32 {}
// SAFETY: every bit pattern is a number of this type, and it is aligned to at most eight bytes.
unsafe impl Plain for u64 {}

/// Zeros at first.
#[derive(Debug)]
pub(crate) struct Lines {
    start: NonNull<u8>,
    layout: Layout,
    /// The mapping that they lie in, perhaps with others; None: they are the allocator's.
    mapping: Option<Arc<Mapping>>,
}

/// Pages of the system's, which are given back with the last that lies in them.
#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    length: usize,
    /// The first large page in it.
    start: NonNull<u8>,
}

// SAFETY: it only says where memory is, which is given back once.
unsafe impl Send for Mapping {}
// SAFETY: nothing is written through it.
unsafe impl Sync for Mapping {}

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

    /// Those of a layer's weights: next to each other's, so that small layers lie in large pages, too, which the system makes
    /// several times as fast as small ones. None when there is not as much memory.
    pub(crate) fn of_weights(num_bytes: usize) -> Option<Self> {
        /// The mapping that has room left, and how much of it is taken.
        static LAST: Mutex<(Weak<Mapping>, usize)> = Mutex::new((Weak::new(), 0));
        let size = num_bytes.max(1).checked_next_multiple_of(LINE)?;
        if !cfg!(target_os = "linux") || size > CHUNK / 4 {
            return Self::new(num_bytes);
        }
        let layout = Layout::from_size_align(size, LINE).ok()?;
        let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
        let mapping = match last.0.upgrade() {
            Some(mapping) if last.1 + size <= CHUNK => mapping,
            _ => {
                let mapping = Arc::new(Mapping::new(CHUNK)?);
                *last = (Arc::downgrade(&mapping), 0);
                mapping
            }
        };
        // SAFETY: as many bytes as are not taken yet lie behind those that are.
        let start = unsafe { mapping.start.add(last.1) };
        last.1 += size;
        Some(Self { start, layout, mapping: Some(mapping) })
    }

    #[cfg(target_os = "linux")]
    fn mapped(size: usize) -> Option<Self> {
        let layout = Layout::from_size_align(size, LARGE_PAGE).ok()?;
        let mapping = Mapping::new(size)?;
        Some(Self { start: mapping.start, layout, mapping: Some(Arc::new(mapping)) })
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

impl Mapping {
    /// Pages that nothing is written to here: the threads that write first, perhaps several at once, have the system make
    /// them, near their own processor where a machine has several.
    #[cfg(target_os = "linux")]
    fn new(size: usize) -> Option<Self> {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
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
        Some(Self { base, length, start })
    }

    #[cfg(not(target_os = "linux"))]
    fn new(_size: usize) -> Option<Self> {
        None
    }
}

#[cfg(target_os = "linux")]
impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and nothing refers to it any more. It cannot fail for a mapping that is
        // there.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        if self.mapping.is_none() {
            // SAFETY: it was allocated with this layout.
            unsafe { dealloc(self.start.as_ptr(), self.layout) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{CHUNK, Lines};

    #[test]
    fn weights_lie_apart_and_are_zeros_at_first() {
        let sizes = [1, 64, 65, 4096, CHUNK / 8, CHUNK / 4, CHUNK / 4 + 1, 3];
        let mut all: Vec<Lines> = (0..4)
            .flat_map(|_| sizes)
            .map(|size| {
                let lines = Lines::of_weights(size).expect("as much memory");
                assert!(
                    lines.num_bytes() >= size && lines.as_ptr().addr().is_multiple_of(64),
                    "{size} bytes"
                );
                lines
            })
            .collect();
        let mut places: Vec<_> = all.iter().map(|lines| (lines.as_ptr().addr(), lines.num_bytes())).collect();
        places.sort_unstable();
        assert!(places.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "{places:?}");
        for (index, lines) in all.iter_mut().enumerate() {
            let bytes = lines.as_mut_slice::<u8>();
            assert!(bytes.iter().all(|&byte| byte == 0), "the {index}th is not zeros");
            bytes.fill(index as u8 + 1);
        }
        while let Some(lines) = all.pop() {
            let expected = all.len() as u8 + 1;
            assert!(
                lines.as_slice::<u8>().iter().all(|&byte| byte == expected),
                "those of others are its own"
            );
        }
    }
}
