//! The id of the largest logit of each row.

use crate::{number::Number, threads::Threads};

/// Logits of which the largest is found before the next are looked at.
const BLOCK: usize = 1024;
/// Numbers that are compared side by side.
const LANES: usize = 16;
/// Logits from which on threads share the rows.
const MIN_SHARED_LOGITS: usize = 1 << 16;

/// The id of the largest logit of each row, the first of equals; −1 where one of them is NaN, or all are minus infinity.
///
/// # Panics
///
/// When there are not as many rows of `vocab_size` as places in `ids`.
pub(crate) fn largest_ids<E: Number>(logits: &[E], vocab_size: usize, threads: &Threads, ids: &mut [i32]) {
    assert_eq!(logits.len(), ids.len() * vocab_size, "a row of logits for each id");
    let places: Vec<_> = ids.iter_mut().map(std::sync::Mutex::new).collect();
    threads.for_each(places.len(), logits.len() >= MIN_SHARED_LOGITS, |row| {
        let id = largest(&logits[row * vocab_size..][..vocab_size]);
        // Each part is taken once: the lock is never waited for.
        **places[row].lock().unwrap_or_else(std::sync::PoisonError::into_inner) = id;
    });
}

fn largest<E: Number>(row: &[E]) -> i32 {
    let (mut most, mut found) = (f32::NEG_INFINITY, None);
    for (index, block) in row.chunks(BLOCK).enumerate() {
        let Some(largest) = largest_of_block(block) else { return -1 };
        if largest > most {
            (most, found) = (largest, Some(index));
        }
    }
    let Some(index) = found else { return -1 };
    let place = row[index * BLOCK..].iter().position(|x| x.widen() >= most);
    place.map_or(-1, |place| (index * BLOCK + place) as i32)
}

/// None if one of them is NaN.
fn largest_of_block<E: Number>(block: &[E]) -> Option<f32> {
    let (mut most, mut are_numbers) = ([f32::NEG_INFINITY; LANES], [true; LANES]);
    let (whole, rest) = block.as_chunks::<LANES>();
    for lanes in whole.iter().map(<[E; LANES]>::as_slice).chain([rest]) {
        for ((x, most), are_numbers) in lanes.iter().zip(&mut most).zip(&mut are_numbers) {
            let x = x.widen();
            *most = if x > *most { x } else { *most };
            *are_numbers &= !x.is_nan();
        }
    }
    let all = are_numbers.iter().all(|&are_numbers| are_numbers);
    all.then(|| most.iter().fold(f32::NEG_INFINITY, |most, &x| if x > most { x } else { most }))
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    fn ids(logits: &[f32], vocab_size: usize) -> Vec<i32> {
        let mut found = vec![-2; logits.len() / vocab_size];
        largest_ids(logits, vocab_size, &Threads::alone(), &mut found);
        let narrow: Vec<bf16> = logits.iter().map(|&x| bf16::from_f32(x)).collect();
        let mut of_narrow = vec![-2; found.len()];
        largest_ids(&narrow, vocab_size, &Threads::new(2).expect("two threads"), &mut of_narrow);
        assert_eq!(of_narrow, found);
        found
    }

    #[test]
    fn the_first_of_the_largest_wherever_it_is() {
        for vocab_size in [1, 15, 16, 1024, 1025, 5000] {
            for place in [0, vocab_size / 2, vocab_size - 1] {
                let mut row: Vec<f32> = (0..vocab_size).map(|i| -((i % 7) as f32)).collect();
                row[place] = 3.0;
                if place + 1 < vocab_size {
                    row[vocab_size - 1] = 3.0;
                }
                let rows = [row.clone(), vec![f32::NEG_INFINITY; vocab_size], row].concat();
                assert_eq!(ids(&rows, vocab_size), [place as i32, -1, place as i32]);
            }
        }
    }

    #[test]
    fn nan_has_no_id_and_infinity_has_one() {
        let mut row = vec![0.5; 3000];
        row[2999] = f32::INFINITY;
        assert_eq!(ids(&row, 3000), [2999]);
        for place in [0, 1500, 2998] {
            let mut row = row.clone();
            row[place] = f32::NAN;
            assert_eq!(ids(&row, 3000), [-1]);
        }
    }
}
