//! Choice of the `ZeRO` stage under a budget (`ZeRO`, arXiv:1910.02054).

use super::Session;
use super::ranks::cluster;
use crate::Result;
use crate::plan::estimate::Parallel;
use crate::plan::planner::{Fit, Request};
use crate::plan::{Plan, Zero};

impl Session {
    /// The plan within the budget at the first `ZeRO` stage, from the configured one on, that is as fast as without a
    /// budget; else the fastest plan that fits at any stage that these ranks can run.
    ///
    /// # Errors
    /// If nothing fits at any of these stages: the error of the last one.
    pub(super) fn fit(&self, request: &Request) -> Result<Plan> {
        let configured = self.config.memory.zero();
        if self.world.replicas().is_solo() {
            return Ok(request.fit()?.plan);
        }
        let cluster = cluster(&self.world, &request.profile)?;
        let mut best: Option<(f64, Fit)> = None;
        let mut refused = None;
        for stage in Zero::STAGES.into_iter().filter(|&z| z >= configured) {
            let parallel = self.divided(stage, cluster);
            if stage > configured && !can_shard(request, parallel) {
                continue;
            }
            let mut sharded = request.clone();
            sharded.memory.set_zero(stage);
            sharded.parallel = parallel;
            // ranks that shard nothing have the plan of one rank
            let as_one = stage == configured && request.parallel.devices() == 1;
            let fits = sharded.fit().and_then(|timed| {
                let seconds = cost(&timed);
                Ok((seconds, if as_one { request.fit()? } else { timed }))
            });
            let (seconds, fit) = match fits {
                Ok(fits) => fits,
                // a later stage may fit
                Err(error) => {
                    refused = Some(error);
                    continue;
                }
            };
            (sharded.budget, sharded.host_budget) = (None, None);
            let is_fast = sharded.fit().is_ok_and(|free| seconds <= MAX_SLOWDOWN * cost(&free));
            if best.as_ref().is_none_or(|(least, _)| seconds < *least) {
                best = Some((seconds, fit));
            }
            if is_fast {
                break;
            }
        }
        match (best, refused) {
            (Some((_, fit)), _) => {
                let stage = fit.plan.policy().zero;
                if stage > configured {
                    tracing::info!(
                        "memory.zero_stage: {} is used to fit the budget; {} was set",
                        stage.number(),
                        configured.number()
                    );
                }
                Ok(fit.plan)
            }
            (None, Some(error)) => Err(error.into()),
            (None, None) => Ok(request.fit()?.plan),
        }
    }
}

/// Maximum time of a plan that counts as fast as without a budget, relative to it.
const MAX_SLOWDOWN: f64 = 1.01;

fn cost(fit: &Fit) -> f64 {
    fit.estimate.seconds.total() * fit.memory.moments.penalty()
}

/// Returns true if the configuration supports sharding of state by these degrees.
fn can_shard(request: &Request, parallel: Parallel) -> bool {
    let memory = &request.memory;
    // a configuration with this stage would be rejected otherwise
    let stages = parallel.pipeline == 1 || parallel.zero <= Zero::Stage1;
    let codes = request.workload.arch.base.is_none() || parallel.zero < Zero::Stage3;
    let whole = memory.reshard_after_forward || parallel.zero < Zero::Stage3;
    stages && codes && whole && parallel.check(&request.workload).is_ok()
}
