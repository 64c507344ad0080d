//! The matrix unit of a processor (AMX): tiles of 16 rows of 64 bytes, and the instructions on them.
//!
//! Rust has no stable names for these instructions, so they are written as assembly. Nothing that the compiler makes of Rust
//! touches a tile register, so what one piece of assembly leaves there the next one finds.

#![allow(clippy::inline_always, reason = "a tile instruction is one instruction")]

use std::{arch::asm, sync::OnceLock};

use crate::simd::instructions;

/// Rows of a tile, and vectors of 32 bits in each.
pub(crate) const TILE_ROWS: usize = 16;
/// Numbers of 16 bits in a row of a tile: so many inputs are multiplied by one instruction.
pub(crate) const TILE_INPUTS: usize = 32;
/// Numbers of 16 bits in a tile.
pub(crate) const TILE: usize = TILE_ROWS * TILE_INPUTS;
/// Bytes from row to row of a tile that lies in one piece.
const ROW_BYTES: usize = 64;

/// Whether the machine has a matrix unit for `bf16`, and AVX-512, and the system lets this process use it.
pub(crate) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| instructions::have_amx() && is_permitted())
}

/// Whether the matrix unit multiplies whole numbers of 8 bits, too.
pub(crate) fn multiplies_whole_numbers() -> bool {
    instructions::have_amx_int8() && is_available()
}

/// Ask the system for the tile registers, which it gives on demand alone, because they make contexts large.
#[cfg(all(target_os = "linux", not(miri)))]
fn is_permitted() -> bool {
    const SYS_ARCH_PRCTL: isize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XFEATURE_XTILEDATA: usize = 18;
    let status: isize;
    // SAFETY: the call takes two numbers and touches no memory of the process; the kernel changes `rcx` and `r11`. It gives
    // the whole process the right to the registers, or an error where kernel or hypervisor know none.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") SYS_ARCH_PRCTL => status,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    status == 0
}

#[cfg(not(all(target_os = "linux", not(miri))))]
fn is_permitted() -> bool {
    false
}

/// The shapes of the tile registers, as `ldtilecfg` reads them.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// The tile registers of this thread, in use until it is dropped.
///
/// Registers 0 to 3 are sums, 4 and 5 hold activations, 6 and 7 weights.
pub(crate) struct Tiles(());

impl Tiles {
    /// Sums and activations of `rows` rows, 1 to 16.
    ///
    /// # Safety
    ///
    /// [`is_available`], and nothing else on this thread uses tile registers meanwhile.
    pub(crate) unsafe fn new(rows: usize) -> Self {
        // SAFETY: the caller found the unit available and lets no other code of this thread use tiles.
        unsafe { Self::with_inputs(rows, ROW_BYTES) }
    }

    /// The same where activations are `bytes` of inputs, up to 64, four of which meet each row of a tile of weights.
    ///
    /// # Safety
    ///
    /// As [`Self::new`].
    pub(crate) unsafe fn with_inputs(rows: usize, bytes: usize) -> Self {
        debug_assert!((1..=TILE_ROWS).contains(&rows) && bytes.is_multiple_of(4) && bytes <= ROW_BYTES);
        let mut shapes =
            Shapes { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        shapes.row_bytes[..8].fill(ROW_BYTES as u16);
        shapes.row_bytes[4..6].fill(bytes as u16);
        shapes.rows[..6].fill(rows as u8);
        shapes.rows[6..8].fill((bytes / 4) as u8);
        // SAFETY: 64 bytes are read; the shapes fit palette 1; the caller found the unit available and lets no other code
        // of this thread use tiles.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const shapes, options(nostack, readonly, preserves_flags));
        }
        Self(())
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: a `Tiles` exists only where there is a matrix unit.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}

macro_rules! tile_instructions {
    ($($register:literal: $load:ident)*) => {
        $(
            /// A tile of which each row follows the one before it.
            ///
            /// # Safety
            ///
            /// A [`Tiles`] lives, and as much may be read as its register holds.
            #[inline(always)]
            pub(crate) unsafe fn $load(from: *const u16) {
                // SAFETY: the caller keeps a `Tiles` alive, and as much may be read at `from` as the register holds.
                unsafe {
                    asm!(
                        concat!("tileloadd tmm", $register, ", [{from} + {stride}]"),
                        from = in(reg) from,
                        stride = in(reg) ROW_BYTES,
                        options(nostack, readonly, preserves_flags),
                    );
                }
            }
        )*
    };
}

tile_instructions!(4: load_first_rows 5: load_second_rows 6: load_first_outputs 7: load_second_outputs);

macro_rules! sum_instructions {
    ($($register:literal: $zero:ident $load:ident $store:ident $multiply:ident by $rows:literal $outputs:literal)*) => {
        $(
            /// # Safety
            ///
            /// A [`Tiles`] lives.
            #[inline(always)]
            pub(crate) unsafe fn $zero() {
                // SAFETY: the caller keeps a `Tiles` alive, so the register is configured.
                unsafe { asm!(concat!("tilezero tmm", $register), options(nostack, nomem, preserves_flags)) };
            }
            /// # Safety
            ///
            /// A [`Tiles`] lives; its rows may be read, `stride` bytes apart.
            #[inline(always)]
            pub(crate) unsafe fn $load(from: *const f32, stride: usize) {
                // SAFETY: the caller keeps a `Tiles` alive, and a whole tile may be read at the place given.
                unsafe {
                    asm!(
                        concat!("tileloadd tmm", $register, ", [{from} + {stride}]"),
                        from = in(reg) from,
                        stride = in(reg) stride,
                        options(nostack, readonly, preserves_flags),
                    );
                }
            }
            /// # Safety
            ///
            /// A [`Tiles`] lives; its rows may be written, `stride` bytes apart.
            #[inline(always)]
            pub(crate) unsafe fn $store(to: *mut f32, stride: usize) {
                // SAFETY: the caller keeps a `Tiles` alive, and a whole tile may be written at the place given.
                unsafe {
                    asm!(
                        concat!("tilestored [{to} + {stride}], tmm", $register),
                        to = in(reg) to,
                        stride = in(reg) stride,
                        options(nostack, preserves_flags),
                    );
                }
            }
            /// Add the products of activations and weights.
            ///
            /// # Safety
            ///
            /// A [`Tiles`] lives.
            #[inline(always)]
            pub(crate) unsafe fn $multiply() {
                // SAFETY: the caller keeps a `Tiles` alive, so the three registers are configured, with shapes that fit
                // each other.
                unsafe {
                    asm!(
                        concat!("tdpbf16ps tmm", $register, ", tmm", $rows, ", tmm", $outputs),
                        options(nostack, nomem, preserves_flags),
                    );
                }
            }
        )*
    };
}

sum_instructions!(
    0: zero_0 load_0 store_0 multiply_0 by 4 6
    1: zero_1 load_1 store_1 multiply_1 by 4 7
    2: zero_2 load_2 store_2 multiply_2 by 5 6
    3: zero_3 load_3 store_3 multiply_3 by 5 7
);

/// The sums of products of whole numbers of 8 bits, as whole numbers of 32 bits, to two tiles at `to`, one after the other: rows
/// of activations that are `ROW` bytes apart by two tiles of weights, side by side, of which each four inputs are `QUAD` bytes
/// apart.
///
/// # Safety
///
/// A [`Tiles`] of [`Tiles::with_inputs`] lives; as much may be read and written as its registers hold.
#[inline(always)]
pub(crate) unsafe fn multiply_whole_numbers<const ROW: usize, const QUAD: usize>(
    rows: *const i8,
    weights: *const i8,
    to: *mut i32,
) {
    // SAFETY: the caller keeps a `Tiles` alive, with shapes that fit each other, and what is read and written lies where the
    // caller may read and write.
    unsafe {
        asm!(
            "tileloadd tmm4, [{rows} + {row_bytes}]",
            "tileloadd tmm6, [{weights} + {quad_bytes}]",
            "tileloadd tmm7, [{weights} + {quad_bytes} + 64]",
            "tilezero tmm0",
            "tilezero tmm1",
            "tdpbssd tmm0, tmm4, tmm6",
            "tdpbssd tmm1, tmm4, tmm7",
            "tilestored [{to} + {to_bytes}], tmm0",
            "tilestored [{to} + {to_bytes} + 1024], tmm1",
            rows = in(reg) rows,
            row_bytes = in(reg) ROW,
            weights = in(reg) weights,
            quad_bytes = in(reg) QUAD,
            to = in(reg) to,
            to_bytes = in(reg) ROW_BYTES,
            options(nostack, preserves_flags),
        );
    }
}
