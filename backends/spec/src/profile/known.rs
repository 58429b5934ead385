//! GPUs that many people have, by name.

use super::{DeviceProfile, MatmulFlops, Origin, Pool};
use crate::{Backend, KernelTable};

/// A row of the makers' data sheets (2026): peak TFLOP/s of plain f32 and of dense bf16 (0: none), GB/s of memory, GB/s
/// of the host link in one direction (0: unified memory), GiB.
struct Row {
    /// Words that all stand in the device's name; the first row that fits counts.
    words: &'static [&'static str],
    f32: f64,
    bf16: f64,
    memory: f64,
    link: f64,
    gib: f64,
    /// FLOP/s that products in half precision reach at most.
    most: f64,
}

/// A GPU of NVIDIA's.
const fn nvidia(words: &'static [&'static str], numbers: [f64; 5]) -> Row {
    let [f32, bf16, memory, link, gib] = numbers;
    Row { words, f32, bf16, memory, link, gib, most: OWN_PRODUCTS }
}

/// A GPU of another maker.
const fn other(words: &'static [&'static str], numbers: [f64; 5]) -> Row {
    let row = nvidia(words, numbers);
    Row { most: CUBEK_PRODUCTS, ..row }
}

/// Longer names before their beginnings. A capacity the driver tells wins over the one here.
const ROWS: [Row; 36] = [
    nvidia(&["B200"], [75.0, 2250.0, 7700.0, 55.0, 180.0]),
    nvidia(&["H200"], [67.0, 989.0, 4800.0, 55.0, 141.0]),
    nvidia(&["H100", "PCIe"], [51.0, 756.0, 2000.0, 55.0, 80.0]),
    nvidia(&["H100"], [67.0, 989.0, 3350.0, 55.0, 80.0]),
    nvidia(&["A100", "40GB"], [19.5, 312.0, 1555.0, 25.0, 40.0]),
    nvidia(&["A100"], [19.5, 312.0, 2039.0, 25.0, 80.0]),
    nvidia(&["L40S"], [91.6, 362.0, 864.0, 25.0, 48.0]),
    nvidia(&["L40"], [90.5, 181.0, 864.0, 25.0, 48.0]),
    nvidia(&["L4"], [30.3, 121.0, 300.0, 25.0, 24.0]),
    nvidia(&["A10G"], [31.2, 70.0, 600.0, 25.0, 24.0]),
    nvidia(&["RTX A6000"], [38.7, 155.0, 768.0, 25.0, 48.0]),
    nvidia(&["V100"], [15.7, 0.0, 900.0, 12.5, 16.0]),
    nvidia(&["Tesla T4"], [8.1, 0.0, 320.0, 12.5, 16.0]),
    nvidia(&["RTX 5090"], [104.8, 209.0, 1792.0, 55.0, 32.0]),
    nvidia(&["RTX 5080"], [56.3, 113.0, 960.0, 55.0, 16.0]),
    nvidia(&["RTX 5070"], [30.9, 62.0, 672.0, 55.0, 12.0]),
    nvidia(&["RTX 4090"], [82.6, 165.0, 1008.0, 25.0, 24.0]),
    nvidia(&["RTX 4080"], [48.7, 97.0, 717.0, 25.0, 16.0]),
    nvidia(&["RTX 4070"], [29.1, 58.0, 504.0, 25.0, 12.0]),
    nvidia(&["RTX 4060"], [15.1, 30.0, 272.0, 12.5, 8.0]),
    nvidia(&["RTX 3090"], [35.6, 71.0, 936.0, 25.0, 24.0]),
    nvidia(&["RTX 3080"], [29.8, 59.0, 760.0, 25.0, 10.0]),
    nvidia(&["RTX 3070"], [20.3, 41.0, 448.0, 25.0, 8.0]),
    nvidia(&["RTX 3060"], [12.7, 25.0, 360.0, 25.0, 12.0]),
    nvidia(&["RTX 2080"], [10.1, 0.0, 448.0, 12.5, 8.0]),
    other(&["MI300X"], [163.4, 1307.0, 5300.0, 55.0, 192.0]),
    other(&["7900 XTX"], [61.4, 123.0, 960.0, 25.0, 24.0]),
    other(&["Arc", "A770"], [19.7, 0.0, 560.0, 12.5, 16.0]),
    other(&["M4 Max"], [18.4, 0.0, 546.0, 0.0, 36.0]),
    other(&["M4 Pro"], [9.3, 0.0, 273.0, 0.0, 24.0]),
    other(&["M4"], [4.6, 0.0, 120.0, 0.0, 16.0]),
    other(&["M3 Max"], [14.2, 0.0, 400.0, 0.0, 36.0]),
    other(&["M3"], [4.1, 0.0, 100.0, 0.0, 8.0]),
    other(&["M2"], [3.6, 0.0, 100.0, 0.0, 8.0]),
    other(&["M1 Max"], [10.4, 0.0, 400.0, 0.0, 32.0]),
    other(&["M1"], [2.6, 0.0, 68.0, 0.0, 8.0]),
];

/// Share of a data sheet's peaks that large products and long copies usually reach.
const REACHED: f64 = 0.6;

/// FLOP/s of large products in half precision by the kernels for NVIDIA's tensor cores, on an H200 (`BENCHMARKS.md`,
/// "On a GPU, beside PyTorch"): some two fifths of its peak. No other GPU is taken to do better until one has been
/// measured.
const OWN_PRODUCTS: f64 = 3.6e14;

/// FLOP/s of large products in half precision by `CubeK`'s kernels, which all other GPUs have.
const CUBEK_PRODUCTS: f64 = 9e13;

/// Seconds from one small kernel to the next there.
const LAUNCH: f64 = 9.6e-6;

impl DeviceProfile {
    /// The profile of a GPU by its name, where it is a well-known one; without kernels.
    pub fn known(name: &str) -> Option<Self> {
        let fits = |row: &&Row| row.words.iter().all(|word| stands_in(name, word));
        let row = ROWS.iter().find(fits)?;
        let unified = row.link == 0.0;
        Some(Self {
            name: name.to_owned(),
            matmul_flops: MatmulFlops {
                f32: row.f32 * 1e12 * REACHED,
                bf16: (row.bf16 > 0.0).then_some((row.bf16 * 1e12 * REACHED).min(row.most)),
            },
            memory_bandwidth: row.memory * 1e9 * REACHED,
            host_bandwidth: if unified { row.memory * 1e9 * REACHED } else { 4e10 },
            host_link: (!unified).then_some(row.link * 1e9 * REACHED),
            kernel_overhead: if unified { 1.5e-5 } else { LAUNCH },
            rates: None,
            capacity_bytes: Some((row.gib * f64::from(1 << 30)) as u64),
            largest_buffer: None,
            pool: Pool::GPU,
            links: None,
            // the likeliest; whoever opens the device knows
            backend: if unified { Backend::Metal } else { Backend::Cuda },
            kernels: KernelTable::default(),
            origin: Origin::DataSheet,
        })
    }
}

/// Returns true if `word` stands in `name` as a word of its own, so that an L40 is no L4.
fn stands_in(name: &str, word: &str) -> bool {
    let (name, word) = (name.to_lowercase(), word.to_lowercase());
    name.match_indices(&word).any(|(at, _)| {
        let edge = |c: Option<char>| c.is_none_or(|c| !c.is_ascii_alphanumeric());
        edge(name[..at].chars().next_back()) && edge(name[at + word.len()..].chars().next())
    })
}

#[cfg(test)]
mod tests {
    use crate::DeviceProfile;

    #[test]
    fn a_gpu_is_known_by_the_name_its_driver_gives() {
        for (name, tflops) in [
            ("NVIDIA H100 80GB HBM3", 67.0),
            ("NVIDIA H100 PCIe", 51.0),
            ("NVIDIA A100-SXM4-40GB", 19.5),
            ("NVIDIA L40S", 91.6),
            ("NVIDIA L4", 30.3),
            ("NVIDIA GeForce RTX 4090", 82.6),
            ("Apple M3 Max", 14.2),
            ("Apple M2 Pro", 3.6),
        ] {
            let profile = DeviceProfile::known(name).unwrap_or_else(|| panic!("{name}"));
            assert!((profile.matmul_flops.f32 - tflops * 0.6e12).abs() < 1e9, "{name}");
        }
        assert_eq!(DeviceProfile::known("llvmpipe (LLVM 15.0.6, 256 bits)"), None);
    }

    #[test]
    fn apple_gpus_have_no_link_to_the_host() {
        assert!(DeviceProfile::known("Apple M4 Max").is_some_and(|p| p.is_unified()));
        assert!(DeviceProfile::known("Tesla T4").is_some_and(|p| !p.is_unified()));
    }
}
