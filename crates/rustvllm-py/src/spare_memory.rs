//! How this process gives freed memory back to the system.

/// Let grammars give back what compiling them has freed.
pub(crate) fn register() {
    #[cfg(target_env = "gnu")]
    ::grammar::give_back_memory_with(trim);
}

/// Give the system the pages in which nothing is allocated any more. Takes a millisecond, after a large schema 25.
#[cfg(target_env = "gnu")]
fn trim() {
    use std::ffi::c_int;

    unsafe extern "C" {
        fn malloc_trim(pad: usize) -> c_int;
    }
    // SAFETY: the function of the C library may be called at any time by any thread.
    unsafe { malloc_trim(0) };
}
