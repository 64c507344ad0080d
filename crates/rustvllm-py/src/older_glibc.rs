//! `stat64`, `lstat64` and `fstat64` for glibc before 2.33, which has them under other names; the standard library calls them.
//!
//! `build.rs` says where that matters.

use std::ffi::{c_char, c_int, c_void};

/// The layout of `struct stat64` on x86-64, as these functions number it.
const LAYOUT: c_int = 1;

unsafe extern "C" {
    fn __xstat64(layout: c_int, path: *const c_char, stat: *mut c_void) -> c_int;
    fn __lxstat64(layout: c_int, path: *const c_char, stat: *mut c_void) -> c_int;
    fn __fxstat64(layout: c_int, file: c_int, stat: *mut c_void) -> c_int;
}

// SAFETY: the name is defined nowhere else in this module; the C library's own serves the rest of the process.
#[unsafe(no_mangle)]
unsafe extern "C" fn stat64(path: *const c_char, stat: *mut c_void) -> c_int {
    // SAFETY: the same contract, which the caller keeps: a path that ends with 0 and room for a `struct stat64`.
    unsafe { __xstat64(LAYOUT, path, stat) }
}

// SAFETY: like `stat64`, the name is defined here alone in this module.
#[unsafe(no_mangle)]
unsafe extern "C" fn lstat64(path: *const c_char, stat: *mut c_void) -> c_int {
    // SAFETY: the caller gives a path that ends with 0 and room for a `struct stat64`, as this function wants.
    unsafe { __lxstat64(LAYOUT, path, stat) }
}

// SAFETY: like `stat64`, the name is defined here alone in this module.
#[unsafe(no_mangle)]
unsafe extern "C" fn fstat64(file: c_int, stat: *mut c_void) -> c_int {
    // SAFETY: the caller gives room for a `struct stat64`; a file that is not open is an error, not undefined.
    unsafe { __fxstat64(LAYOUT, file, stat) }
}
