//! `firebrick plan`.

mod cluster;
mod details;
mod units;

use super::UserError;
use crate::arguments::PlanArgs;
use crate::output;
use crate::planned::{self, Links, Planned, Spread};
use crate::table::Table;
use firebrick::engine::config;
use firebrick::engine::plan::estimate::Sizes;
use firebrick::engine::plan::planner::Request;
use firebrick::engine::plan::{PlanReport, Preset};
use firebrick::spec::Origin;
use std::fmt::Write;
use units::{bytes, duration, seconds};

/// Most named categories of a phase.
const MAX_CATEGORIES: usize = 3;

pub fn run(args: &PlanArgs) -> anyhow::Result<()> {
    let mut config = config::load(&args.config, &args.overrides)?;
    let (parallel, memory) = (&args.parallel, &mut config.memory);
    memory.budget = args.budget.or(memory.budget);
    memory.zero_stage = parallel.zero_stage.unwrap_or(memory.zero_stage);
    for (degree, given) in [
        (&mut memory.ulysses_sequence_parallel_size, parallel.sequence_parallel),
        (&mut memory.tensor_model_parallel_size, parallel.tensor_parallel),
        (&mut memory.pipeline_model_parallel_size, parallel.pipeline_parallel),
    ] {
        *degree = given.map_or(*degree, |given| given as usize);
    }
    let spread = args.parallel.spread(&config);
    let planned = planned::plan(config, spread)?;
    if let Some(e) = &planned.unread {
        tracing::info!("could not read the prompts and examples, so the plan assumes the maximum lengths: {e}");
    }
    let report = &planned.report;
    if let Some(path) = &args.output {
        let text = serde_json::to_string_pretty(report)?;
        std::fs::write(path, text + "\n").map_err(|e| UserError(format!("cannot write {}: {e}", path.display())))?;
    }
    let text = text(args, &planned, &spread)?;
    output::print_as(args.json, report, || text)
}

/// The plan, and the requested details.
fn text(args: &PlanArgs, planned: &Planned, spread: &Spread) -> anyhow::Result<String> {
    let (request, report) = (&planned.request, &planned.report);
    let heading = heading(request, report, spread.links) + &preset_lines(report);
    let mut parts = if spread.is_chosen() {
        let settings = format!("as settings: {}\n", report.settings.join(" "));
        let rest = [
            cluster::messages(report),
            peak(request, report),
            cluster::binds(request, report),
            cluster::others(report),
            settings,
        ];
        vec![heading + "\n" + &phases(report, true) + "\n" + &rest.concat()]
    } else {
        vec![
            heading,
            phases(report, false) + &cluster::messages(report) + &peak(request, report),
            turned_on(request, report),
        ]
    };
    if args.details.phases {
        parts.push(details::phases(report));
    }
    if args.details.techniques {
        parts.push(details::decisions(request, report));
        parts.push(details::techniques(request)?);
    }
    if args.details.batches {
        parts.push(details::groups(report));
    }
    if args.details.models {
        parts.push(details::models(request)?);
    }
    if !args.details.any() && !spread.is_chosen() {
        let last = parts.pop().unwrap_or_default();
        parts.push(
            last + "More: --phases (bytes by category), --techniques (what each saves and costs), --batches (other group sizes), --models \
             (public models)\n",
        );
    }
    parts.extend(args.output.as_ref().map(|path| {
        let path = path.display();
        match (request.is_supported(), request.parallel.devices()) {
            (false, _) => {
                format!(
                    "written to {path}; `firebrick train` cannot run it: docs/guides/multi_gpu.md lists the degrees and \
                     models that it supports\n"
                )
            }
            (true, 1) => {
                format!("written to {path}; run it with `firebrick train ... --plan {path}`\n")
            }
            (true, ranks) => {
                format!("written to {path}; run it with `mpirun -n {ranks} firebrick train ... --plan {path}`\n")
            }
        }
    }));
    parts.retain(|part| !part.is_empty());
    Ok(parts.join("\n"))
}

fn heading(request: &Request, report: &PlanReport, links: Links) -> String {
    let w = &request.workload;
    let millions = Sizes::new(&w.arch, w.lora.as_ref()).total() as f64 / 1e6;
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
    let several = report.parallel.map_or_else(String::new, |_| spread_lines(request, links));
    let replicas = match request.parallel.data {
        1 => String::new(),
        n => format!(" x {n} replicas"),
    };
    let b = &report.batch;
    let step = match w.examples {
        Some(examples) => format!("{} examples of up to {} tokens, supervised", b.prompts, examples.length),
        None => format!(
            "{} prompts x {} completions of {} + {} tokens",
            b.prompts, b.group_size, w.prompt_length, w.response_length
        ),
    };
    let sampled = if w.samples() { format!("; {} sampled at a time", b.max_num_seqs) } else { String::new() };
    let critic = w.critic_arch().map_or_else(String::new, |arch| {
        let millions = Sizes::new(arch, None).total() as f64 / 1e6;
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

/// The degrees, their machines, and whether the trainer supports them.
fn spread_lines(request: &Request, links: Links) -> String {
    let parallel = &request.parallel;
    let machines =
        parallel.cluster.map_or_else(String::new, |cluster| format!("cluster {}\n", cluster::machines(cluster, links)));
    format!(
        "spread  {parallel}; {}\n{machines}        Bytes, budget and batch are per device; times include the messages that it \
         waits for.\n",
        cluster::runs(request)
    )
}

/// The preset's settings, and those that this device or run does not support.
fn preset_lines(report: &PlanReport) -> String {
    let Some(preset) = &report.preset else {
        return String::new();
    };
    let name = preset.name.map_or("none", Preset::name);
    let mut text = format!("preset  {name} sets {}\n", preset.settings().join(" "));
    for left in &preset.left_out {
        let _ = writeln!(text, "        omitted: {}, because {}", left.setting(), left.because);
    }
    text
}

/// A line per phase: its bytes, its time, the messages of one device if there are several, and the largest categories.
fn phases(report: &PlanReport, sends: bool) -> String {
    let has_host = sends || report.host_peak_bytes > 0;
    let header = ["PHASE", "BYTES"].into_iter().chain(has_host.then_some("HOST")).chain(["TIME"]);
    let sent = if sends { &["SENT", "FOR"][..] } else { &[] };
    let header: Vec<&str> = header.chain(sent.iter().copied()).chain(["MOST OF IT"]).collect();
    let mut table = Table::new(1, &header).ends_with_text();
    let peak = report.peak_phase().map(|p| p.name);
    for phase in &report.phases {
        // phases outside of steps that are not the peak are for --phases
        if !phase.name.is_in_step() && peak != Some(phase.name) {
            continue;
        }
        let mark = if peak == Some(phase.name) { " *" } else { "" };
        let mut held: Vec<_> = phase.categories.iter().filter(|(_, b)| sends || **b > 0).collect();
        held.sort_by_key(|(_, b)| std::cmp::Reverse(**b));
        let most = held.iter().take(if sends { 2 } else { MAX_CATEGORIES });
        let most: Vec<String> = most.map(|(category, b)| format!("{} {}", category.name(), bytes(**b))).collect();
        let mut cells = vec![format!("{}{mark}", phase.name), bytes(phase.total_bytes)];
        cells.extend(has_host.then(|| bytes(phase.host_bytes)));
        cells.push(seconds(report, phase.name));
        if sends {
            cells.extend(cluster::sent(report, phase.name));
        }
        cells.push(most.join(", "));
        table.row(cells);
    }
    table.render()
}

/// The peak, whether it fits, and the step's time.
fn peak(request: &Request, report: &PlanReport) -> String {
    let peak = report.peak_phase();
    let stages = request.parallel.pipeline;
    let moment = peak.map_or_else(String::new, |phase| match phase.stage {
        Some(stage) => format!("{} (stage {stage} of {stages}, from 0)", phase.moment),
        None => phase.moment.clone(),
    });
    let fits = match request.allowed() {
        Some(allowed) if report.peak_bytes <= allowed => {
            format!(" It fits: {} are left.", bytes(allowed - report.peak_bytes))
        }
        _ => match request.profile.capacity_bytes {
            Some(has) if report.peak_bytes > has => {
                format!(" It does not fit: the device has {}; --budget finds a plan that does.", bytes(has))
            }
            Some(has) => format!(" The device has {}.", bytes(has)),
            None => String::new(),
        },
    };
    format!(
        "* peak, {}, reached at: {moment}.{fits} A step takes about {}.\n",
        bytes(report.peak_bytes),
        duration(report.seconds.total()),
    )
}

/// The enabled techniques, a line each, with their settings. Those that save nothing by themselves share a line.
fn turned_on(request: &Request, report: &PlanReport) -> String {
    if report.decisions.is_empty() {
        return "Nothing is recomputed, offloaded or chunked: everything fits as configured.\n".into();
    }
    let step = report.seconds.total();
    let title = match request.budget {
        Some(_) => "TURNED ON, the fastest that fits",
        None => "TURNED ON",
    };
    let cost = |seconds: f64| {
        let share = seconds / (step - seconds).max(1e-12) * 100.0;
        format!("{share:+.0} %")
    };
    let (saving, others): (Vec<_>, Vec<_>) = report.decisions.iter().partition(|decision| decision.saves_bytes > 0);
    let saving = saving
        .into_iter()
        .map(|d| vec![d.what.clone(), bytes(d.saves_bytes), d.phase.to_string(), cost(d.costs_seconds)]);
    let others = (!others.is_empty()).then(|| {
        let what = format!("{} more that save nothing here by themselves (--techniques)", others.len());
        vec![what, String::new(), String::new(), cost(others.iter().map(|decision| decision.costs_seconds).sum())]
    });
    let table = Table::new(1, &[title, "SAVES", "IN", "COST PER STEP"]).rows(saving.chain(others));
    format!("{}as settings: {}\n", table.render(), report.settings.join(" "))
}
