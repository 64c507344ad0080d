//! The memory of Python that a step of a decoder writes: the one place that checks it and borrows it for the kernels.

use ::cpu_kernels::{CacheElement, Element};
use pyo3::{
    buffer::{self, PyBuffer},
    exceptions::PyValueError,
    prelude::*,
};

use crate::cpu::{
    arrays::{Place, Rows, expect_all_apart},
    attention::int32_slice,
    caches::CachesOf,
};

/// The arrays that a step writes, as Python gives them, in elements of `T` and caches of `K`.
pub(super) struct StepArrays<'a, T: buffer::Element, K: buffer::Element> {
    /// The stream.
    pub(super) hidden: &'a mut Rows<T>,
    /// Where the result goes, if not into the stream.
    pub(super) out: Option<&'a mut Rows<T>>,
    pub(super) ids: Option<&'a mut PyBuffer<i32>>,
    pub(super) caches: &'a CachesOf<K>,
}

/// Those arrays as the slices that kernels write.
pub(super) struct StepMemory<'a, E, C> {
    pub(super) hidden: &'a mut [E],
    /// Empty without an array for it.
    pub(super) out: &'a mut [E],
    pub(super) ids: Option<&'a mut [i32]>,
    /// Each once.
    pub(super) caches: Vec<&'a mut [C]>,
}

impl<'a, T: buffer::Element, K: buffer::Element> StepArrays<'a, T, K> {
    /// Borrow all of them for as long as they are borrowed here: elements of `T` mean `E`, those of `K` mean `C`.
    ///
    /// `read` is what the step reads meanwhile, of which some may be one array; `overlap` is the error of arrays that
    /// share memory.
    ///
    /// That no other thread of Python touches the arrays meanwhile is the caller's part, as with every call of numpy
    /// and torch.
    pub(super) fn borrow<E: Element, C: CacheElement<E>>(
        self,
        read: &[&[i32]],
        overlap: &str,
    ) -> PyResult<StepMemory<'a, E, C>> {
        let Self { hidden, out, ids, caches } = self;
        let mut read: Vec<Place> = read.iter().map(|array| place_of(array)).collect();
        read.sort_unstable();
        read.dedup();
        let mut places = read;
        places.extend(&caches.places);
        for rows in [Some(&*hidden), out.as_deref()].into_iter().flatten() {
            rows.expect_contiguous()?;
            rows.expect_writable()?;
            places.push(rows.place());
        }
        if let Some(ids) = &ids {
            if ids.readonly() {
                return Err(PyValueError::new_err("ids must be writable"));
            }
            places.push(place_of(int32_slice(ids)?));
        }
        expect_all_apart(places, overlap)?;
        // SAFETY: all are writable and contiguous, which `CachesOf` has checked of the caches; they share no byte with each
        // other or with what is read, and each is borrowed once; the views, which live as long, keep the memory where it is.
        unsafe {
            Ok(StepMemory {
                hidden: hidden.as_mut_slice(),
                out: out.map_or(&mut [], |out| out.as_mut_slice()),
                ids: ids.map(|ids| int32_mut_slice(ids)),
                caches: caches.own.iter().map(|cache| cache.as_mut_slice()).collect(),
            })
        }
    }
}

/// # Safety
///
/// The array is contiguous, aligned and writable, and nothing else reads or writes it while the slice lives.
unsafe fn int32_mut_slice(array: &mut PyBuffer<i32>) -> &mut [i32] {
    if array.item_count() == 0 {
        return &mut [];
    }
    // SAFETY: the view keeps the memory of as many elements; the rest is the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(array.buf_ptr().cast(), array.item_count()) }
}

fn place_of(array: &[i32]) -> Place {
    (array.as_ptr().addr(), array.as_ptr().addr() + size_of_val(array))
}
