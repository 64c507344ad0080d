//! `Memory` and `Mapping`: a memfd without a name, and parts of it in this process.

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
        // What is mapped stays there: a page beyond the end of the file would end the process that reads it.
        fcntl_add_seals(&fd, SealFlags::SHRINK)?;
        Ok(Self { fd })
    }

    /// Memory that another process made.
    pub(crate) fn adopt(fd: OwnedFd) -> Self {
        Self { fd }
    }

    pub(crate) fn num_bytes(&self) -> io::Result<u64> {
        Ok(fstat(&self.fd)?.st_size.try_into().unwrap_or(0))
    }

    /// Have `num_bytes` more at the end, zeros, from a multiple of `PAGE` on; where they begin.
    pub(crate) fn extend(&self, num_bytes: u64) -> io::Result<u64> {
        let start = self.num_bytes()?.next_multiple_of(PAGE);
        ftruncate(&self.fd, start + num_bytes)?;
        Ok(start)
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A part of the memory in this process, for as long as this lives.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: plain shared memory; who may touch which byte when is the protocol of `Control`.
unsafe impl Send for Mapping {}
// SAFETY: shared memory, which any thread may reach; see `Send`.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// # Errors
    /// The memory is shorter, or the kernel maps no more.
    pub(crate) fn new(memory: &Memory, start: u64, len: usize) -> io::Result<Self> {
        if memory.num_bytes()? < start + len as u64 {
            return Err(io::Error::other("the step channel's memory is shorter than it says"));
        }
        // SAFETY: the kernel chooses the place; the file is long enough and sealed against becoming shorter.
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
        // SAFETY: our own mapping, and the last use of it.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}
