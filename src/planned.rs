//! The plan of a configuration, for commands that print or check it.

use crate::commands::UserError;
use firebrick::backends::memory::free_bytes;
use firebrick::backends::profile;
use firebrick::engine::checkpoint::architecture;
use firebrick::engine::config::{DdpBackend, RunConfig, mode_of};
use firebrick::engine::data::DatasetStats;
use firebrick::engine::plan::PlanReport;
use firebrick::engine::plan::estimate::Parallel;
use firebrick::engine::plan::planner::{Degrees, Request};
use firebrick::engine::plan::size::{Budget, Bytes};
use firebrick::engine::planning;
use firebrick::spec::{Backend, Cluster, DeviceProfile, Link, LinkKind, LinkSpec};

/// A planner's request and result.
pub struct Planned {
    pub request: Request,
    pub report: PlanReport,
    /// Error of reading the prompts and examples; the plan then assumes the longest ones.
    pub unread: Option<firebrick::engine::Error>,
}

/// Given links between devices.
#[derive(Clone, Copy, Debug, Default)]
pub struct Links {
    pub link: Option<LinkSpec>,
    pub node_link: Option<LinkSpec>,
}

impl Links {
    /// Machines with devices each, and these links, or the measured ones, or those that the device is
    /// usually sold with.
    fn cluster(self, machines: (u64, u64), profile: &DeviceProfile) -> Cluster {
        profile.cluster(machines, [self.link, self.node_link])
    }

    /// Links through the host by default, for ranks without NCCL.
    fn through_host(self) -> Self {
        let host = Some(LinkSpec::named(LinkKind::Host));
        Self { link: self.link.or(host), node_link: self.node_link.or(host) }
    }

    /// Returns true if either is neither given nor measured.
    pub fn are_assumed(self, cluster: Cluster) -> bool {
        let assumed = |given: Option<LinkSpec>, link: Link| given.is_none() && link.kind != LinkKind::Measured;
        assumed(self.link, cluster.link) || (cluster.nodes > 1 && assumed(self.node_link, cluster.node_link))
    }
}

/// The devices that a run is spread over.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    pub degrees: SpreadDegrees,
    /// Machines, and devices of each.
    pub machines: (u64, u64),
    pub links: Links,
}

/// The degrees of a spread.
#[derive(Clone, Copy, Debug)]
pub enum SpreadDegrees {
    /// Given degrees, on the machines if these have as many devices.
    Given(Parallel),
    /// The planner's choice.
    Chosen(Degrees),
}

impl Spread {
    /// Devices of one machine with these sequence, tensor and pipeline degrees and the critic's sequence degree.
    pub fn from_groups(degrees: [usize; 3], critic: Option<usize>) -> Self {
        let [sequence, tensor, pipeline] = degrees.map(|degree| degree as u64);
        let critic = critic.map(|degree| degree as u64);
        let parallel = Parallel {
            // as many devices as groups of either size fill
            data: critic.map_or(1, |degree| smallest_factor(sequence, degree)),
            sequence,
            critic_sequence: critic.filter(|&n| n != sequence),
            tensor,
            pipeline,
            ..Parallel::default()
        };
        let degrees = SpreadDegrees::Given(parallel);
        Self { degrees, machines: (1, parallel.devices()), links: Links::default() }
    }

    /// Returns true if the planner chooses the degrees.
    pub fn is_chosen(&self) -> bool {
        matches!(self.degrees, SpreadDegrees::Chosen(_))
    }
}

/// The smallest factor whose product with a number is a multiple of `divisor`.
fn smallest_factor(number: u64, divisor: u64) -> u64 {
    (1..divisor).find(|&n| (n * number).is_multiple_of(divisor.max(1))).unwrap_or(divisor.max(1))
}

/// Plans a run. The model's `config.json` is read and the data are surveyed; no weights are read and no device is
/// opened.
pub fn plan(mut config: RunConfig, mut spread: Spread) -> anyhow::Result<Planned> {
    let (profile, info) = profile::look_up(config.device);
    check_ranks(&spread, profile.backend)?;
    planning::restrict_to_device(&mut config, &profile, info.as_ref());
    if (profile.backend, config.trainer.ddp_backend) == (Backend::Cuda, DdpBackend::Mpi) {
        spread.links = spread.links.through_host();
    }
    let (arch, mode) = (architecture(&config)?, mode_of(&config));
    planning::check_preset_share(&mut config, mode, &arch, &profile)?;
    config.rollout.check_on(profile.backend, config.precision)?;
    config.check_exact_on(profile.backend)?;
    config.check_matmul_on(profile.backend)?;
    if spread.is_chosen() && config.memory.budget.is_none() {
        config.memory.budget = Some(capacity(&profile)?);
    }
    let free = info.as_ref().and_then(free_bytes);
    let mut request = planning::request(&config, mode, &arch, profile, free)?;
    let Spread { degrees, machines, links } = spread;
    if let SpreadDegrees::Given(parallel) = degrees {
        let parallel = placed(parallel, machines, links, &request.profile);
        request = request.spread(parallel)?;
    }
    let survey = DatasetStats::read(&config);
    let unread = survey.map(|survey| planning::observe(&mut request.workload, survey)).err();
    let mut others = Vec::new();
    let mut fit = match (degrees, request.budget) {
        (SpreadDegrees::Chosen(degrees), _) => {
            let cluster = links.cluster(machines, &request.profile);
            let cluster_fit = request.fit_cluster(cluster, &degrees)?;
            (request, others) = (cluster_fit.request, cluster_fit.others);
            cluster_fit.fit
        }
        (SpreadDegrees::Given(_), Some(_)) => request.fit()?,
        (SpreadDegrees::Given(_), None) => request.as_configured()?,
    };
    request.workload.kv_cache_bytes = planning::cache_bytes(&config, &arch, &request, &fit.plan)?;
    fit.estimate = request.predict(fit.plan.clone()).estimate;
    let mut report = PlanReport::new(&request, fit)?;
    report.preset = Some(config.applied_preset).filter(|preset| preset.name.is_some());
    report.other_degrees = others;
    let parallel = &request.parallel;
    let rollout_tensor = parallel.rollout_tensor.unwrap_or(parallel.tensor);
    if rollout_tensor > 1 || rollout_tensor != config.rollout.tensor_model_parallel_size as u64 {
        let key = "rollout.tensor_model_parallel_size";
        report.settings.insert(0, format!("{key}={rollout_tensor}"));
    }
    if spread.is_chosen() {
        let ranks = [("nnodes", machines.0), ("n_gpus_per_node", machines.1)];
        let ranks = ranks.map(|(key, n)| format!("trainer.{key}={n}"));
        report.settings.splice(0..0, ranks);
    }
    Ok(Planned { request, report, unread })
}

/// Given degrees on the machines if these have as many devices, or else all
/// in one machine.
fn placed(parallel: Parallel, (nodes, gpus): (u64, u64), links: Links, profile: &DeviceProfile) -> Parallel {
    if !parallel.is_several() {
        return parallel;
    }
    let devices = parallel.devices();
    let machines = if nodes.saturating_mul(gpus) == devices { (nodes, gpus) } else { (1, devices) };
    parallel.on(links.cluster(machines, profile), profile.backend)
}

/// Rejects chosen degrees for devices that do not support several ranks.
fn check_ranks(spread: &Spread, backend: Backend) -> anyhow::Result<()> {
    let runs = matches!(backend, Backend::Cpu | Backend::Cuda);
    if runs || !spread.is_chosen() || spread.machines.0 * spread.machines.1 == 1 {
        return Ok(());
    }
    Err(UserError(format!(
        "several ranks run on cpu and cuda devices, not on {}; plan for device=cuda, or omit --nodes and --gpus",
        backend.name()
    ))
    .into())
}

/// The memory of a device, as the default budget of chosen degrees.
fn capacity(profile: &DeviceProfile) -> anyhow::Result<Budget> {
    let capacity = profile.capacity_bytes.ok_or_else(|| {
        UserError(format!(
            "degrees are chosen within the memory of each device, and the memory of {} is unknown; set it with \
             --budget, as in --budget 80GiB",
            profile.name
        ))
    })?;
    Ok(Budget::Bytes(Bytes(capacity)))
}
