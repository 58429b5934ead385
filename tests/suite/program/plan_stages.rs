//! `firebrick plan` for stages of a pipeline.

use super::plan::json;
use super::{Bench, refused, succeeded};

#[test]
fn a_plan_for_several_devices_is_not_run() {
    let bench = Bench::new();
    let said = succeeded(
        &bench.firebrick("plan", &["--pipeline-parallel", "2", "--tensor-parallel", "2", "--output", "plan.json"]),
    );
    assert!(said.contains("`firebrick train` cannot run it"), "{said}");
    let output = bench.firebrick("train", &["--plan", "plan.json"]);
    refused(
        &output,
        &[
            "plan.json",
            "4 devices: tensor 2 x pipeline 2",
            "pass only one of --tensor-parallel, --sequence-parallel and --pipeline-parallel",
        ],
    );
}

#[test]
fn a_plan_for_stages_names_the_one_that_binds_and_says_what_runs_it() {
    let bench = Bench::new();
    let args = ["--pipeline-parallel", "2", "--output", "plan.json"];
    let said = succeeded(&bench.firebrick("plan", &args));
    for part in [
        "spread  2 devices: pipeline 2; run by `mpirun -n 2 firebrick train`",
        "of 2, from 0)",
        "`mpirun -n 2 firebrick train ... --plan plan.json`",
    ] {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
    let own = json(&bench, &args[..2]);
    let configured = json(&bench, &["memory.pipeline_model_parallel_size=2"]);
    assert_eq!(configured["parallel"], own["parallel"]);
    assert_eq!(configured["phases"], own["phases"]);
    for phase in own["phases"].as_array().unwrap() {
        assert!(phase["stage"].as_u64().is_some_and(|s| s < 2), "{phase}");
    }
    let settings = own["settings"].as_array().unwrap();
    let key = "memory.pipeline_model_parallel_size=2";
    assert!(settings.iter().any(|setting| setting == key), "{settings:?}");
    let output = bench.firebrick("train", &["--plan", "plan.json"]);
    refused(&output, &["was made for 2 devices: pipeline 2", "memory.pipeline_model_parallel_size is 1; set it to 2"]);
}
