//! The largest public model whose adapters train on a GPU of a size, by the number format of the frozen base: the table
//! of docs/reference/models.md.
//!
//! `cargo run --release -p firebrick-plan --example bases`

use firebrick_arch::lora::LoraConfig;
use firebrick_plan::estimate::rules::{of_run, public};
use firebrick_plan::estimate::{Parallel, Sizes, Workload};
use firebrick_plan::{Preset, Result};
use firebrick_spec::{Backend, BaseFormat, DeviceProfile, KernelTable, Operation, Precision};

/// Dense models in order of their sizes.
const MODELS: [&str; 10] = [
    "Qwen2.5-0.5B",
    "Llama-3.2-1B",
    "Qwen2.5-1.5B",
    "Qwen2.5-3B",
    "Qwen3-4B",
    "Qwen2.5-7B",
    "Llama-3.1-8B",
    "Gemma-3-12B",
    "Qwen2.5-32B",
    "Llama-3.1-70B",
];

/// GiB of GPUs.
const SIZES: [u64; 7] = [8, 12, 16, 24, 48, 80, 141];

/// Device bytes of a step of 32 rollouts, groups of 8, 512 + 512 tokens, under the preset `balanced`.
fn bytes(name: &str, base: Option<BaseFormat>, profile: &DeviceProfile) -> Result<u64> {
    let arch = public(name)?.in_precision(Precision::Bf16).with_base(base);
    let lora = LoraConfig::default().in_arch(&arch);
    let workload = Workload { lora: Some(lora), ..Workload::grpo(arch, [512, 512], 4, 8) };
    let needs = of_run(&workload, 32, profile, &Parallel::default())?;
    let own = needs.iter().find(|rule| rule.need.preset == Preset::Balanced);
    Ok(own.map_or(u64::MAX, |rule| rule.need.device_bytes))
}

#[allow(clippy::print_stdout, reason = "a program that prints a table")]
fn main() -> Result<()> {
    let kernels = KernelTable::new(Operation::ALL).with_vocabulary_tile(8192);
    let profile = DeviceProfile::assumed(Backend::Cuda).with_kernels(kernels);
    let formats = [None, Some(BaseFormat::Int8), Some(BaseFormat::Nf4)];
    println!("| GPU | bf16 | int8 | nf4 |\n|---|---|---|---|");
    for gib in SIZES {
        let mut row = vec![format!("{gib} GiB")];
        for base in formats {
            let mut fits = None;
            for name in MODELS {
                let bytes = bytes(name, base, &profile)?;
                if bytes as f64 * 1.1 <= (gib << 30) as f64 {
                    let size = Sizes::of(&public(name)?, None).total();
                    fits = fits.max(Some((size, name, bytes)));
                }
            }
            row.push(fits.map_or("–".to_owned(), |(_, name, bytes)| {
                format!("{name}, {:.1} GiB", bytes as f64 / f64::from(1 << 30))
            }));
        }
        println!("| {} |", row.join(" | "));
    }
    Ok(())
}
