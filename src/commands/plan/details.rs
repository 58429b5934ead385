//! Optional output of `firebrick plan`: every category by phase, each technique, other batches, public models.

use super::units::{bytes, duration, seconds};
use crate::table::Table;
use firebrick::backends::accounts::Category;
use firebrick::backends::device::Backend;
use firebrick::backends::profile;
use firebrick::engine::plan::PlanReport;
use firebrick::engine::plan::estimate::rules;
use firebrick::engine::plan::planner::Request;

/// Categories down, phases across, the peak marked.
pub fn phases(report: &PlanReport) -> String {
    let peak = report.peak_phase().map(|p| p.name);
    let names: Vec<String> = report
        .phases
        .iter()
        .map(|p| if Some(p.name) == peak { format!("{} *", p.name) } else { p.name.to_string() })
        .collect();
    let header: Vec<&str> = std::iter::once("").chain(names.iter().map(String::as_str)).collect();
    let mut table = Table::new(1, &header);
    let line =
        |name: &str, cells: Vec<String>| -> Vec<String> { std::iter::once(name.to_owned()).chain(cells).collect() };
    for category in Category::ALL {
        let held: Vec<u64> = report.phases.iter().map(|p| p.categories.get(&category).copied().unwrap_or(0)).collect();
        if held.iter().any(|&b| b > 0) {
            let cells = held.iter().map(|&b| if b > 0 { bytes(b) } else { "-".into() });
            table.row(line(category.name(), cells.collect()));
        }
    }
    let totals = report.phases.iter().map(|p| bytes(p.total_bytes));
    table.row(line("total", totals.collect()));
    if report.host_peak_bytes > 0 {
        let host = report.phases.iter().map(|p| bytes(p.host_bytes));
        table.row(line("host", host.collect()));
    }
    let seconds = report.phases.iter().map(|p| seconds(report, p.name));
    table.row(line("time", seconds.collect()));
    format!("{}* peak\n", table.render())
}

/// The enabled techniques, with their settings, savings and costs.
pub fn decisions(request: &Request, report: &PlanReport) -> String {
    if report.decisions.is_empty() {
        return String::new();
    }
    let step = report.seconds.total();
    let rows = report.decisions.iter().map(|d| {
        let share = d.costs_seconds / (step - d.costs_seconds).max(1e-12) * 100.0;
        let (saves, phase) = (bytes(d.saves_bytes), d.phase.to_string());
        vec![d.what.clone(), d.settings.clone(), saves, phase, format!("{share:+.0} %")]
    });
    let table = Table::new(2, &["TECHNIQUE", "SETTING", "SAVES", "IN", "COST PER STEP"]).rows(rows);
    let why = match request.budget {
        Some(_) => {
            "Savings and costs of each technique by itself, with the others unchanged. Together they are the fastest \
             plan within the budget:"
        }
        None => "Savings and costs of each technique by itself, with the others unchanged:",
    };
    format!("{why}\n{}", table.render())
}

/// Saving and cost of each technique by itself, for the planned step.
pub fn techniques(request: &Request) -> anyhow::Result<String> {
    let costs = rules::techniques(&request.workload, &request.memory, &request.profile, &request.parallel)?;
    let percent = |ratio: f64| format!("{:+.0} %", (ratio - 1.0) * 100.0);
    let rows =
        costs.iter().map(|cost| vec![format!("memory.{}", cost.settings), percent(cost.bytes), percent(cost.time)]);
    let techniques = Table::new(1, &["EACH TECHNIQUE BY ITSELF, for this step", "BYTES", "TIME"]).rows(rows);
    Ok(format!(
        "{}gradient checkpointing is compared with keeping the whole graph, the others with gradient checkpointing\n",
        techniques.render()
    ))
}

/// Other group sizes with the same settings and rollouts per step.
pub fn groups(report: &PlanReport) -> String {
    if report.groups.is_empty() {
        return String::new();
    }
    let rows = report.groups.iter().map(|group| {
        let setting = format!("rollout.n={} trainer.train_batch_size={}", group.group_size, group.prompts);
        let fits = if group.fits { "yes" } else { "no" };
        vec![setting, group.max_num_seqs.to_string(), bytes(group.peak_bytes), duration(group.seconds), fits.to_owned()]
    });
    let header = ["SAME NUMBER OF ROLLOUTS PER STEP, same settings", "SAMPLED AT A TIME", "PEAK", "TIME", "FITS"];
    Table::new(1, &header).rows(rows).render()
}

/// Public models under the presets, in f32 and in bf16.
pub fn models(request: &Request) -> anyhow::Result<String> {
    // offloading to the host helps only if its memory is separate
    let gpu = if request.profile.is_unified() { profile::assumed(Backend::Cuda) } else { request.profile.clone() };
    let presets = rules::PRESETS.iter().map(|preset| preset.name());
    let header: Vec<&str> = ["PUBLIC MODELS", "parameters", "in"].into_iter().chain(presets).collect();
    let rows = rules::table(&gpu)?.into_iter().map(|model| {
        let parameters = format!("{:.2} billion", model.parameters as f64 / 1e9);
        let needs = model
            .presets
            .iter()
            .map(|need| format!("{} x{:.1} t{:.1}", bytes(need.device_bytes), need.multiplier, need.relative_time));
        [model.name.to_owned(), parameters, model.precision.to_string()].into_iter().chain(needs).collect()
    });
    let table = Table::new(1, &header).rows(rows);
    Ok(format!(
        "{}on one device: bytes, multiple of the weights' bytes in that precision, time relative to `fast`; 32 rollouts \
         of 512 + 512 tokens, no reference\n",
        table.render()
    ))
}
