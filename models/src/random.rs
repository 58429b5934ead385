//! Random numbers as a pure function of what they are for.
//!
//! Philox 4×32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011): a counter-based
//! generator, so that a token's draw depends on (seed, step, prompt index, sample, position) and on nothing
//! else: not on the batch it was sampled in, its slot, or the order of work.

use rayon::prelude::*;

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Words of a block, and blocks of a task of [`Stream::normals`].
const WORDS: usize = 4;
const BLOCKS_PER_TASK: usize = 4096;

/// One block of Philox 4×32-10: four 32-bit words from a 128-bit counter and a 64-bit key.
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut c, mut k) = (counter, key);
    for round in 0..ROUNDS {
        if round > 0 {
            k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
        }
        let p0 = u64::from(MULTIPLIERS[0]) * u64::from(c[0]);
        let p1 = u64::from(MULTIPLIERS[1]) * u64::from(c[2]);
        c = [(p1 >> 32) as u32 ^ c[1] ^ k[0], p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ k[1], p0 as u32];
    }
    c
}

/// A word as a number in the open interval (0, 1) with 23 random bits, exact in f32: one more and the last would round
/// to 1.
fn unit(word: u32) -> f32 {
    ((word >> 9) as f32 + 0.5) * (1.0 / 8_388_608.0)
}

/// Names one sampled completion: every draw of it follows from this and the token's position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DrawKey {
    /// The run's seed.
    pub seed: u64,
    /// Training step (0 outside of training).
    pub step: u32,
    /// Index of the prompt among all the run's draws.
    pub prompt_index: u32,
    /// Index of the completion in its group.
    pub sample: u32,
}

impl DrawKey {
    /// The uniform number in (0, 1) that decides the token at `position` of the completion.
    pub fn uniform(&self, position: u32) -> f32 {
        let key = [self.seed as u32, (self.seed >> 32) as u32];
        unit(philox([self.step, self.prompt_index, self.sample, position], key)[0])
    }
}

/// A sequence of random words for one purpose (a shuffle, an initialisation), by seed and stream number.
#[derive(Clone, Debug)]
pub struct Stream {
    key: [u32; 2],
    number: u64,
    block: u64,
    words: [u32; WORDS],
    used: usize,
}

impl Stream {
    /// The stream `stream` of `seed`; two different streams of one seed are independent.
    pub fn new(seed: u64, stream: u64) -> Self {
        // The key is whitened so that a `Stream` never replays a `DrawKey`'s counter under its key.
        let key = [seed as u32 ^ 0x5EED_F12E, (seed >> 32) as u32 ^ 0xB21C_4A7E];
        Self { key, number: stream, block: 0, words: [0; WORDS], used: WORDS }
    }

    /// The next 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        if self.used == WORDS {
            let (s, b) = (self.number, self.block);
            self.words = philox([b as u32, (b >> 32) as u32, s as u32, (s >> 32) as u32], self.key);
            self.block += 1;
            self.used = 0;
        }
        self.used += 1;
        self.words[self.used - 1]
    }

    /// A number in (0, 1).
    pub fn uniform(&mut self) -> f32 {
        unit(self.next_u32())
    }

    /// A standard normal number (Box–Muller).
    pub fn normal(&mut self) -> f32 {
        let (u, v) = (f64::from(self.uniform()), f64::from(self.uniform()));
        ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
    }

    /// As many standard normal numbers times `std` as a new stream gives by [`Self::normal`], drawn on all cores: each
    /// task begins at a block of its own, so that the numbers do not depend on the cores.
    ///
    /// # Panics
    /// If the stream has given numbers before.
    pub fn normals(self, count: usize, std: f32) -> Vec<f32> {
        assert!(self.block == 0, "a new stream");
        let mut values = vec![0.0; count];
        // a normal number takes two words
        let tasks = values.par_chunks_mut(BLOCKS_PER_TASK * WORDS / 2).enumerate();
        tasks.for_each(|(task, values)| {
            let mut stream = Self { block: (task * BLOCKS_PER_TASK) as u64, ..self.clone() };
            values.fill_with(|| stream.normal() * std);
        });
        values
    }

    /// A number in `0..bound`, without modulo bias (Lemire's method). `bound` must not be 0.
    pub fn below(&mut self, bound: u32) -> u32 {
        let threshold = bound.wrapping_neg() % bound;
        loop {
            let product = u64::from(self.next_u32()) * u64::from(bound);
            if product as u32 >= threshold {
                return (product >> 32) as u32;
            }
        }
    }

    /// Fisher–Yates shuffle.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = self.below(last as u32 + 1) as usize;
            items.swap(last, other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the Random123 distribution for philox4x32-10.
    #[test]
    fn philox_gives_the_known_answers_of_random123() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn uniform_numbers_stay_inside_the_open_interval() {
        assert!(unit(0) > 0.0 && unit(u32::MAX) < 1.0);
        let key = DrawKey { seed: 7, step: 1, prompt_index: 2, sample: 3 };
        let mean = (0..4096).map(|p| f64::from(key.uniform(p))).sum::<f64>() / 4096.0;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
    }

    #[test]
    fn a_shuffle_is_a_permutation_that_depends_on_the_seed_alone() {
        let shuffled = |seed| {
            let mut v: Vec<u32> = (0..100).collect();
            Stream::new(seed, 0).shuffle(&mut v);
            v
        };
        assert_eq!(shuffled(1), shuffled(1));
        assert_ne!(shuffled(1), shuffled(2));
        let mut sorted = shuffled(3);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn normal_numbers_of_all_cores_are_those_of_one() {
        let mut one = Stream::new(3, 1 << 32);
        for count in [0, 1, BLOCKS_PER_TASK * 2, BLOCKS_PER_TASK * 5 + 3] {
            let std = 0.02;
            let mut one = one.clone();
            let serial: Vec<f32> = (0..count).map(|_| one.normal() * std).collect();
            assert_eq!(Stream::new(3, 1 << 32).normals(count, std), serial);
        }
        // those of earlier versions, so that a model of a seed stays the same
        let bits = [(); 3].map(|()| one.normal().to_bits());
        assert_eq!(bits, [1_060_159_133, 1_073_730_508, 3_222_133_687]);
    }

    #[test]
    fn normal_numbers_have_mean_zero_and_variance_one() {
        let mut stream = Stream::new(11, 5);
        let v: Vec<f64> = (0..20_000).map(|_| f64::from(stream.normal())).collect();
        let mean = v.iter().sum::<f64>() / v.len() as f64;
        let var = v.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / v.len() as f64;
        assert!(mean.abs() < 0.03 && (var - 1.0).abs() < 0.05, "{mean} {var}");
    }
}
