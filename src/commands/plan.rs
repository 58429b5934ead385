//! `firebrick plan`.

use super::UserError;
use crate::arguments::PlanArgs;
use crate::output;
use crate::table::Table;
use firebrick::backends::accounts::Category;
use firebrick::backends::device::Backend;
use firebrick::backends::memory::free_bytes;
use firebrick::backends::profile;
use firebrick::engine::checkpoint::architecture;
use firebrick::engine::config;
use firebrick::engine::config::mode_of;
use firebrick::engine::data::DatasetStats;
use firebrick::engine::plan::estimate::{Sizes, rules};
use firebrick::engine::plan::planner::Request;
use firebrick::engine::plan::size::Bytes;
use firebrick::engine::plan::{PlanReport, Preset};
use firebrick::engine::planning;
use firebrick::spec::{DeviceProfile, Origin};
use std::fmt::Write;

pub fn run(args: &PlanArgs) -> anyhow::Result<()> {
    let mut config = config::load(&args.config, &args.overrides)?;
    if args.budget.is_some() {
        config.memory.budget = args.budget;
    }
    let (profile, info) = profile::look_up(config.device);
    planning::settle_on(&mut config, &profile, info.as_ref());
    let (arch, mode) = (architecture(&config)?, mode_of(&config));
    planning::settle_share(&mut config, mode, &arch, &profile)?;
    config.rollout.check_on(profile.backend, config.precision)?;
    let free = info.as_ref().and_then(free_bytes);
    let mut request =
        planning::request(&config, mode, &arch, profile, free)?.spread(args.parallel.degrees())?;
    match DatasetStats::of(&config) {
        Ok(survey) => planning::observe(&mut request.workload, survey),
        Err(e) => tracing::info!(
            "could not read the prompts and examples, so the plan assumes the maximum lengths: {e}"
        ),
    }
    let mut fit = match request.budget {
        Some(_) => request.fit()?,
        None => request.as_configured()?,
    };
    planning::settle_cache(&config, &arch, &mut request, &fit.plan)?;
    fit.estimate = request.predict(fit.plan.clone()).estimate;
    let mut report = PlanReport::new(&request, fit)?;
    report.preset = Some(config.applied_preset).filter(|preset| preset.name.is_some());
    if let Some(path) = &args.output {
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(path, text + "\n")
            .map_err(|e| UserError(format!("cannot write {}: {e}", path.display())))?;
    }
    if args.json {
        return output::print(&(serde_json::to_string_pretty(&report)? + "\n"));
    }
    let written = args.output.as_ref().map_or_else(String::new, |path| {
        let path = path.display();
        if request.parallel.is_several() {
            format!("\nwritten to {path}; `firebrick train` cannot run it, since it trains on one device\n")
        } else {
            format!("\nwritten to {path}; run it with `firebrick train ... --plan {path}`\n")
        }
    });
    output::print(&format!(
        "{}{}\n{}\n{}\n{}{}{written}",
        heading(&request, &report),
        preset_lines(&report),
        phases(&report),
        decisions(&request, &report),
        groups(&report),
        thumb(&request)?
    ))
}

fn bytes(bytes: u64) -> String {
    Bytes(bytes).to_string()
}

fn heading(request: &Request, report: &PlanReport) -> String {
    let w = &request.workload;
    let millions = Sizes::of(&w.arch, w.lora.as_ref()).total() as f64 / 1e6;
    let origin = match report.profile {
        Origin::Measured => "measured",
        Origin::DataSheet => "from its data sheet",
        Origin::Assumed => "assumed; measure it with `firebrick devices --measure`",
    };
    let budget = match (request.budget, request.allowed()) {
        (Some(budget), Some(allowed)) => format!(
            "budget  {}, of which the plan may use {} (memory.margin {})",
            bytes(budget),
            bytes(allowed),
            request.memory.margin
        ),
        _ => "budget  none: settings as configured".to_owned(),
    };
    let host = match request.host_budget {
        Some(host) => format!("; host {}", bytes(host)),
        None => String::new(),
    };
    let several = match report.parallel {
        Some(parallel) => format!(
            "spread  {parallel}\n        An estimate: bytes, budget and batch are per device, and times exclude communication between\n        \
             devices. Training runs on one device, so `firebrick train --plan` rejects this plan.\n"
        ),
        None => String::new(),
    };
    let replicas = match request.parallel.data {
        1 => String::new(),
        n => format!(" x {n} replicas"),
    };
    let b = &report.batch;
    let step = match w.examples {
        Some(examples) => format!(
            "{} examples of up to {} tokens, supervised",
            b.prompts, examples.length
        ),
        None => format!(
            "{} prompts x {} completions of {} + {} tokens",
            b.prompts, b.group_size, w.prompt_length, w.response_length
        ),
    };
    let sampled = if w.samples() {
        format!("; {} sampled at a time", b.max_num_seqs)
    } else {
        String::new()
    };
    let critic = w.critic_arch().map_or_else(String::new, |arch| {
        let millions = Sizes::of(arch, None).total() as f64 / 1e6;
        format!(
            "critic  {millions:.1} million parameters, {} layers, hidden size {}\n",
            arch.num_layers, arch.hidden_size
        )
    });
    format!(
        "model   {millions:.1} million parameters, {} layers, hidden size {}, vocabulary {}\n\
         {critic}step    {step}\n\
         device  {}, speed {origin}\n\
         {several}{budget}{host}\n\
         batch   {} sequences a micro-batch x {}{replicas} make {} an optimizer step{sampled}\n",
        w.arch.num_layers,
        w.arch.hidden_size,
        w.arch.vocab_size,
        report.device,
        b.micro_batch,
        b.accumulation,
        b.effective_batch,
    )
}

/// What the preset set, and what of it this device or this run cannot have.
fn preset_lines(report: &PlanReport) -> String {
    let Some(preset) = &report.preset else {
        return String::new();
    };
    let name = preset.name.map_or("none", Preset::name);
    let mut text = format!("preset  {name} sets {}\n", preset.settings().join(" "));
    for left in &preset.left_out {
        let _ = writeln!(
            text,
            "        left out: {}, because {}",
            left.setting(),
            left.because
        );
    }
    text
}

/// Categories down, phases across, the peak marked.
fn phases(report: &PlanReport) -> String {
    let peak = report
        .peak_phase()
        .map(|p| p.name.clone())
        .unwrap_or_default();
    let names: Vec<String> = report
        .phases
        .iter()
        .map(|p| {
            if p.name == peak {
                format!("{} *", p.name)
            } else {
                p.name.clone()
            }
        })
        .collect();
    let header: Vec<&str> = std::iter::once("")
        .chain(names.iter().map(String::as_str))
        .collect();
    let mut table = Table::new(1, &header);
    let line = |name: &str, cells: Vec<String>| -> Vec<String> {
        std::iter::once(name.to_owned()).chain(cells).collect()
    };
    for category in Category::ALL {
        let held: Vec<u64> = report
            .phases
            .iter()
            .map(|p| p.categories.get(&category).copied().unwrap_or(0))
            .collect();
        if held.iter().any(|&b| b > 0) {
            let cells = held
                .iter()
                .map(|&b| if b > 0 { bytes(b) } else { "-".into() });
            table.row(line(category.name(), cells.collect()));
        }
    }
    let totals = report.phases.iter().map(|p| bytes(p.total_bytes));
    table.row(line("total", totals.collect()));
    if report.host_peak_bytes > 0 {
        let host = report.phases.iter().map(|p| bytes(p.host_bytes));
        table.row(line("host", host.collect()));
    }
    let s = &report.seconds;
    let seconds = report.phases.iter().map(|p| match p.name.as_str() {
        "rollout" => duration(s.rollout),
        "score" => duration(s.score),
        "backward" => duration(s.backward),
        "optimizer" => duration(s.optimizer),
        "values" => duration(s.values),
        "critic_backward" => duration(s.critic_backward),
        "critic_optimizer" => duration(s.critic_optimizer),
        _ => "-".into(),
    });
    table.row(line("time", seconds.collect()));
    let moment = report
        .peak_phase()
        .map(|p| p.moment.clone())
        .unwrap_or_default();
    format!(
        "{}* peak, {}, reached at: {moment}. A step takes about {}.\n",
        table.render(),
        bytes(report.peak_bytes),
        duration(s.total()),
    )
}

fn duration(seconds: f64) -> String {
    match seconds {
        s if s >= 600.0 => format!("{:.0} min", s / 60.0),
        s if s >= 10.0 => format!("{s:.0} s"),
        s if s >= 0.1 => format!("{s:.1} s"),
        s => format!("{:.1} ms", s * 1e3),
    }
}

fn decisions(request: &Request, report: &PlanReport) -> String {
    if report.decisions.is_empty() {
        return "Nothing is recomputed, offloaded or chunked: everything fits as configured.\n"
            .into();
    }
    let step = report.seconds.total();
    let mut table = Table::new(2, &["TECHNIQUE", "SETTING", "SAVES", "IN", "COST PER STEP"]);
    for d in &report.decisions {
        let share = d.costs_seconds / (step - d.costs_seconds).max(1e-12) * 100.0;
        table.row(vec![
            d.what.clone(),
            d.settings.clone(),
            bytes(d.saves_bytes),
            d.phase.clone(),
            format!("{share:+.0} %"),
        ]);
    }
    let why = match request.budget {
        Some(_) => {
            "Savings and costs of each technique on its own, the others unchanged. Together they are the fastest plan within the budget:"
        }
        None => "Savings and costs of each technique on its own, the others unchanged:",
    };
    format!(
        "{why}\n{}\nas settings: {}\n",
        table.render(),
        report.settings.join(" ")
    )
}

/// Group sizes that the same settings could serve, at as many rollouts a step.
fn groups(report: &PlanReport) -> String {
    if report.groups.is_empty() {
        return String::new();
    }
    let mut table = Table::new(
        1,
        &[
            "SAME NUMBER OF ROLLOUTS PER STEP, same settings",
            "SAMPLED AT A TIME",
            "PEAK",
            "TIME",
            "FITS",
        ],
    );
    for own in &report.groups {
        let (n, prompts) = (own.group_size, own.prompts);
        table.row(vec![
            format!("rollout.n={n} trainer.train_batch_size={prompts}"),
            own.max_num_seqs.to_string(),
            bytes(own.peak_bytes),
            duration(own.seconds),
            if own.fits { "yes" } else { "no" }.to_owned(),
        ]);
    }
    table.render() + "\n"
}

/// Rules of thumb, and what the formulas say for public models.
fn thumb(request: &Request) -> anyhow::Result<String> {
    // host memory helps only where it is another one
    let gpu = if request.profile.is_unified() {
        profile::assumed(Backend::Cuda)
    } else {
        request.profile.clone()
    };
    let rule = rules_of_run(request, &gpu)?;
    let models = public_models(&gpu)?;
    let smallest: Vec<String> = rules::SMALLEST_DEVICE
        .iter()
        .map(|(size, gib)| format!("{size} {gib} GiB"))
        .collect();
    Ok(format!(
        "{}gradient checkpointing is compared with keeping the whole graph, the others with gradient checkpointing\n\n{}the rules \
         multiply the bytes of the weights; beside them, this step under the preset's memory settings, in the run's precision{}\n\
         smallest device by rule, bf16, all techniques: {}\n\n{}on one device: bytes, multiple of the weights' bytes in that \
         precision, smallest device sold that holds them, time relative to `fast`; 32 rollouts of 512 + 512 tokens, no reference\n",
        techniques(request)?.render(),
        rule.render(),
        elsewhere(request),
        smallest.join(", "),
        models.render()
    ))
}

/// Where the rules' column is computed for another device than the run's.
fn elsewhere(request: &Request) -> &'static str {
    if request.profile.is_unified() {
        ", on a GPU with a host link"
    } else {
        ""
    }
}

/// The rules of thumb for the run's own model in its own precision, and what the formulas say of it.
fn rules_of_run(request: &Request, gpu: &DeviceProfile) -> anyhow::Result<Table> {
    let workload = &request.workload;
    let title = format!(
        "RULES OF THUMB: times the weights, {} in {}",
        bytes(rules::weight_bytes(workload)),
        workload.arch.precision
    );
    let header = [title.as_str(), "RULE", "BYTES", "PRESET", "BYTES", "TIMES"];
    let mut table = Table::new(1, &header);
    for found in rules::of_run(workload, request.max_num_seqs, gpu, &request.parallel)? {
        let ([low, high], [least, most]) = (found.rule.rule, found.bytes);
        table.row(vec![
            found.rule.with.into(),
            format!("{low} to {high}"),
            format!("{} to {}", bytes(least), bytes(most)),
            found.rule.preset.name().into(),
            bytes(found.need.device_bytes),
            format!("{:.1}", found.need.multiplier),
        ]);
    }
    Ok(table)
}

/// Public models under the presets, in f32 and in bf16.
fn public_models(gpu: &DeviceProfile) -> anyhow::Result<Table> {
    let presets = rules::MULTIPLIERS.iter().map(|m| m.preset.name());
    let header: Vec<&str> = ["PUBLIC MODELS", "parameters", "in"]
        .into_iter()
        .chain(presets)
        .collect();
    let mut table = Table::new(1, &header);
    for model in rules::table(gpu)? {
        table.row(model.cells());
    }
    Ok(table)
}

/// What each technique saves and costs on its own, for the step that was asked about.
fn techniques(request: &Request) -> anyhow::Result<Table> {
    let mut techniques = Table::new(
        1,
        &["EACH TECHNIQUE ON ITS OWN, for this step", "BYTES", "TIME"],
    );
    for cost in rules::techniques(
        &request.workload,
        &request.memory,
        &request.profile,
        &request.parallel,
    )? {
        let percent = |ratio: f64| format!("{:+.0} %", (ratio - 1.0) * 100.0);
        techniques.row(vec![
            format!("memory.{}", cost.settings),
            percent(cost.bytes),
            percent(cost.time),
        ]);
    }
    Ok(techniques)
}
