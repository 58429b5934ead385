//! Values of a preset that a device and a plan support.

use super::kv_cache::{cache_bytes_of_share, engine_limits};
use super::request::request_within;
use crate::config::{Mode, RunConfig};
use crate::{Error, Result};
use firebrick_arch::Arch;
use firebrick_backends::DeviceInfo;
use firebrick_plan::planner::Request;
use firebrick_plan::{DeviceAbilities, Plan, SHARE};
use firebrick_spec::DeviceProfile;

/// Drops preset values that a device does not support. `info` describes the device, if it is open.
pub fn restrict_to_device(config: &mut RunConfig, profile: &DeviceProfile, info: Option<&DeviceInfo>) {
    let dtypes = info.map(|info| info.dtypes.as_slice());
    config.restrict_to(&DeviceAbilities::new(profile, dtypes));
}

/// Drops the preset's share of the device if it leaves too little for one sequence.
///
/// # Errors
/// Those of the planner's request, and of [`Request::as_configured`].
pub fn check_preset_share(config: &mut RunConfig, mode: Mode, arch: &Arch, profile: &DeviceProfile) -> Result<()> {
    let share = config.rollout.gpu_memory_utilization;
    let Some(share) = share.filter(|_| config.applied_preset.sets(SHARE)) else {
        return Ok(());
    };
    let request = request_within(config, mode, arch, profile.clone(), None)?;
    let plan = request.as_configured()?.plan;
    if let Err(because) = usable_share(config, arch, &request, &plan, share) {
        config.leave_out(SHARE, &reason(because));
    }
    Ok(())
}

/// Maximum bytes of keys and values under a plan, if there is a limit. A share that a preset set does not apply under a
/// plan that leaves too little of it, so that a run continues after a replan.
///
/// # Errors
/// `Error::Config` if the configured share leaves nothing.
pub fn cache_bytes(config: &RunConfig, arch: &Arch, request: &Request, plan: &Plan) -> Result<Option<u64>> {
    let Some(share) = config.rollout.gpu_memory_utilization else {
        return Ok(request.workload.kv_cache_bytes);
    };
    if !config.applied_preset.sets(SHARE) {
        return cache_bytes_of_share(request, plan, share).map(Some);
    }
    match usable_share(config, arch, request, plan, share) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(because) => {
            tracing::warn!("the preset's share of the device does not limit this plan: {}", reason(because));
            Ok(None)
        }
    }
}

fn reason(error: Error) -> String {
    match error {
        Error::Config(detail) => detail,
        other => other.to_string(),
    }
}

/// Bytes of keys and values under a share, if they suffice for the longest sequence.
fn usable_share(config: &RunConfig, arch: &Arch, request: &Request, plan: &Plan, share: f64) -> Result<u64> {
    let bytes = cache_bytes_of_share(request, plan, share)?;
    let sequences = plan.rollout.max_num_seqs;
    engine_limits(&config.rollout, arch, sequences, Some(bytes))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse;
    use firebrick_plan::estimate::rules;
    use firebrick_spec::{Backend, Precision};

    /// A run of half a billion parameters on a GPU of some GiB, and what the planner is asked for it.
    fn on_gpu(gib: u64, overrides: &[&str]) -> (RunConfig, Arch, DeviceProfile) {
        let text = "model: {path: m}\ntask: {kind: arithmetic}\noutput: o\nmemory: {preset: constrained}\n";
        let overrides: Vec<String> = overrides.iter().map(|&s| s.to_owned()).collect();
        let mut config = parse(text, &overrides).expect("a configuration");
        let profile = DeviceProfile { capacity_bytes: Some(gib << 30), ..DeviceProfile::assumed(Backend::Cuda) };
        restrict_to_device(&mut config, &profile, None);
        let arch = rules::public("Qwen2.5-0.5B").expect("a public model");
        (config, arch.in_precision(Precision::Bf16), profile)
    }

    #[test]
    fn the_share_of_a_preset_gives_way_where_it_leaves_nothing_and_a_written_one_does_not() {
        let written = "rollout.gpu_memory_utilization=0.5";
        for (gib, overrides, expected) in [(24, &[][..], Some(0.5)), (1, &[], None), (1, &[written], Some(0.5))] {
            let (mut config, arch, profile) = on_gpu(gib, overrides);
            check_preset_share(&mut config, Mode::Rl, &arch, &profile).expect("a plan");
            assert_eq!(config.rollout.gpu_memory_utilization, expected, "{gib} GiB");
            let request = crate::planning::request(&config, Mode::Rl, &arch, profile, None);
            assert_eq!(request.is_err(), !overrides.is_empty(), "{gib} GiB");
        }
    }

    #[test]
    fn the_share_is_of_the_plan_that_fits_and_not_of_the_settings_as_written() {
        let share = 0.3;
        let overrides = ["memory.preset=fast", "memory.budget=6GiB", "rollout.gpu_memory_utilization=0.3"];
        let (config, arch, profile) = on_gpu(24, &overrides);
        let mut request = crate::planning::request(&config, Mode::Rl, &arch, profile, None).expect("a request");
        let plan = request.fit().expect("a plan").plan;
        let left = cache_bytes_of_share(&request, &plan, share).expect("room");
        assert_ne!(request.workload.kv_cache_bytes, Some(left));
        request.workload.kv_cache_bytes = cache_bytes(&config, &arch, &request, &plan).expect("room");
        assert_eq!(request.workload.kv_cache_bytes, Some(left));
        let estimate = request.predict(plan).estimate;
        let rollout = estimate.phase(firebrick_plan::estimate::EstimatePhase::Rollout).expect("a phase");
        let allowed = (share * (24_u64 << 30) as f64) as u64;
        assert!(rollout.total_bytes <= allowed, "{rollout:?}");
        assert!(estimate.peak_bytes <= request.allowed().expect("a budget"));
    }

    #[test]
    fn a_plan_that_a_run_has_changed_to_may_take_what_the_preset_s_share_was_for() {
        for (overrides, refused) in [(&[][..], false), (&["rollout.gpu_memory_utilization=0.5"], true)] {
            let (config, arch, profile) = on_gpu(1, overrides);
            let request = request_within(&config, Mode::Rl, &arch, profile, None).expect("one");
            let plan = request.as_configured().expect("a plan").plan;
            let bytes = cache_bytes(&config, &arch, &request, &plan);
            assert_eq!(bytes.is_err(), refused);
            assert_eq!(bytes.ok().flatten(), None);
        }
    }
}
