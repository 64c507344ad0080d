//! `Memory` and `Mapping`: a memfd without a name, and mappings of its parts into this process.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::NonNull,
};

use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create},
    mm::{MapFlags, ProtFlags, mmap, munmap},
};

/// Mappings begin at multiples of this.
pub(crate) const PAGE: u64 = 64 << 10;

/// Memory that processes share through a descriptor.
#[derive(Debug)]
pub(crate) struct Memory {
    fd: OwnedFd,
}

impl Memory {
    pub(crate) fn create(num_bytes: u64) -> io::Result<Self> {
        let fd = memfd_create(c"rustvllm-steps", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, num_bytes)?;
        // The file must not shrink: access to a mapped page beyond its end would kill the process.
        fcntl_add_seals(&fd, SealFlags::SHRINK)?;
        Ok(Self { fd })
    }

    /// Use memory that another process made.
    pub(crate) fn adopt(fd: OwnedFd) -> Self {
        Self { fd }
    }

    pub(crate) fn num_bytes(&self) -> io::Result<u64> {
        Ok(fstat(&self.fd)?.st_size.try_into().unwrap_or(0))
    }

    /// Add `num_bytes` of zeros at the end, aligned to `PAGE`; returns where they begin.
    pub(crate) fn extend(&self, num_bytes: u64) -> io::Result<u64> {
        let start = self.num_bytes()?.next_multiple_of(PAGE);
        ftruncate(&self.fd, start + num_bytes)?;
        Ok(start)
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A part of the memory, mapped into this process while this lives.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: plain shared memory; the protocol of `Control` decides who may touch which byte when.
unsafe impl Send for Mapping {}
// SAFETY: shared memory, which any thread may access; see `Send`.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// # Errors
    /// The memory is shorter, or the kernel cannot map more.
    pub(crate) fn new(memory: &Memory, start: u64, len: usize) -> io::Result<Self> {
        if memory.num_bytes()? < start + len as u64 {
            return Err(io::Error::other("the step channel's memory is shorter than it says"));
        }
        // SAFETY: the kernel chooses the address; the file is long enough and sealed against shrinking.
        let mapped = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                memory.as_fd(),
                start,
            )?
        };
        let start = NonNull::new(mapped.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Self { start, len })
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which is not used after this.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}
