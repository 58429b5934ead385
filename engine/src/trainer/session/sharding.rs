//! Which `ZeRO` stage several ranks take under a budget (`ZeRO`, arXiv:1910.02054).

use super::Session;
use super::ranks::cluster;
use crate::Result;
use crate::plan::estimate::Parallel;
use crate::plan::planner::{Fit, Request};
use crate::plan::{Plan, Zero};

impl Session {
    /// The plan within the budget at the first `ZeRO` stage, from the configured one on, at which it is as fast as
    /// without a budget; if there is none, the fastest that fits at any of the stages that these ranks can run.
    ///
    /// # Errors
    /// Where nothing fits at any of these stages: what is missing at the last one.
    pub(super) fn fit(&self, request: &Request) -> Result<Plan> {
        let configured = self.config.memory.zero();
        if self.world.replicas().is_solo() {
            return Ok(request.fit()?.plan);
        }
        let cluster = cluster(&self.world, &request.profile)?;
        let mut best: Option<(f64, Fit)> = None;
        let mut refused = None;
        for stage in Zero::STAGES.into_iter().filter(|&z| z >= configured) {
            let shared = self.divided(stage, cluster);
            if stage > configured && !can_share(request, shared) {
                continue;
            }
            let mut own = request.clone();
            own.memory.set_zero(stage);
            own.parallel = shared;
            // what shares nothing out has the plan of one rank
            let alone = stage == configured && request.parallel.devices() == 1;
            let fits = own.fit().and_then(|timed| {
                let seconds = cost(&timed);
                Ok((seconds, if alone { request.fit()? } else { timed }))
            });
            let (found, fit) = match fits {
                Ok(fits) => fits,
                // a later stage may fit
                Err(error) => {
                    refused = Some(error);
                    continue;
                }
            };
            own.budget = None;
            own.host_budget = None;
            let as_fast_as_without = own.fit().is_ok_and(|free| found <= SAME * cost(&free));
            if best.as_ref().is_none_or(|(least, _)| found < *least) {
                best = Some((found, fit));
            }
            if as_fast_as_without {
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

/// A plan is as fast as without a budget where it takes at most so many times as long.
const SAME: f64 = 1.01;

fn cost(fit: &Fit) -> f64 {
    fit.estimate.seconds.total() * fit.memory.moments.penalty()
}

/// Whether ranks can share state out as these degrees say, with what the configuration sets besides.
fn can_share(request: &Request, parallel: Parallel) -> bool {
    let memory = &request.memory;
    // what a configuration with this stage would be refused for
    let stages = parallel.pipeline == 1 || parallel.zero <= Zero::Stage1;
    let codes = request.workload.arch.base.is_none() || parallel.zero < Zero::Stage3;
    let whole = memory.reshard_after_forward || parallel.zero < Zero::Stage3;
    stages && codes && whole && parallel.check(&request.workload).is_ok()
}
