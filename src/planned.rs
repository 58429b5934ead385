//! The plan of a configuration, for commands that print it and for those that want to know whether there is one.

use firebrick::backends::memory::free_bytes;
use firebrick::backends::profile;
use firebrick::engine::checkpoint::architecture;
use firebrick::engine::config::{RunConfig, mode_of};
use firebrick::engine::data::DatasetStats;
use firebrick::engine::plan::PlanReport;
use firebrick::engine::plan::estimate::Parallel;
use firebrick::engine::plan::planner::Request;
use firebrick::engine::planning;

/// What the planner was asked, and what it said.
pub struct Planned {
    pub request: Request,
    pub report: PlanReport,
    /// Why the prompts and examples could not be read, where the plan assumes the longest ones.
    pub unread: Option<firebrick::engine::Error>,
}

/// Plans a run. The model's `config.json` is read and the data are surveyed; no weights are read and no device is opened.
pub fn plan(mut config: RunConfig, parallel: Parallel) -> anyhow::Result<Planned> {
    let (profile, info) = profile::look_up(config.device);
    planning::settle_on(&mut config, &profile, info.as_ref());
    let (arch, mode) = (architecture(&config)?, mode_of(&config));
    planning::settle_share(&mut config, mode, &arch, &profile)?;
    config.rollout.check_on(profile.backend, config.precision)?;
    let free = info.as_ref().and_then(free_bytes);
    let mut request = planning::request(&config, mode, &arch, profile, free)?.spread(parallel)?;
    let survey = DatasetStats::of(&config);
    let unread = survey
        .map(|survey| planning::observe(&mut request.workload, survey))
        .err();
    let mut fit = match request.budget {
        Some(_) => request.fit()?,
        None => request.as_configured()?,
    };
    planning::settle_cache(&config, &arch, &mut request, &fit.plan)?;
    fit.estimate = request.predict(fit.plan.clone()).estimate;
    let mut report = PlanReport::new(&request, fit)?;
    report.preset = Some(config.applied_preset).filter(|preset| preset.name.is_some());
    Ok(Planned {
        request,
        report,
        unread,
    })
}
