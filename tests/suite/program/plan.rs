//! `firebrick plan`: tables, JSON, and what it says where nothing fits.

use super::{Bench, firebrick, refused, succeeded};
use serde_json::Value;

pub fn json(bench: &Bench, args: &[&str]) -> Value {
    let args = [&["--json"], args].concat();
    serde_json::from_str(&succeeded(&bench.firebrick("plan", &args))).unwrap()
}

#[test]
fn a_plan_is_a_table_a_person_can_read() {
    let bench = Bench::new();
    let said = succeeded(&bench.firebrick("plan", &["--budget", "1GiB"]));
    for part in [
        "budget  1.00 GiB, of which the plan may use 922 MiB",
        "4 prompts x 4 completions",
        "MOST OF IT",
        "* peak",
        "It fits: ",
        "A step takes about ",
        "More: --phases",
    ] {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
    assert!(said.lines().count() <= 22, "{said}");
    // 4.75 MiB, of which 4.28 may be used: a little less than the plain plan takes
    let tight = succeeded(&bench.firebrick("plan", &["--budget", "4980736"]));
    assert!(tight.contains("TURNED ON, the fastest that fits"), "{tight}");
    assert!(tight.contains("as settings: memory."), "{tight}");
    assert!(tight.lines().count() <= 24, "{tight}");
    // with a critic, a warm-up and every technique that there is
    let example = crate::support::project().join("examples/memory_constrained_ppo.yaml");
    let all = succeeded(&firebrick(&["plan", example.to_str().unwrap()]));
    assert!(all.lines().count() <= 25, "{all}");
    assert!(all.contains("more that save nothing here by themselves"), "{all}");
    assert!(!all.contains(" 0 B "), "{all}");
    let each = succeeded(&firebrick(&["plan", example.to_str().unwrap(), "--techniques"]));
    assert!(each.contains("memory.grad_offload") && each.contains(" 0 B "), "{each}");
    assert!(!bench.path("run").exists(), "planning leaves nothing behind");
}

#[test]
fn the_rest_of_a_plan_is_printed_on_request() {
    let bench = Bench::new();
    let short = succeeded(&bench.firebrick("plan", &["--budget", "7MiB"]));
    for (option, parts) in [
        ("--phases", &["kv_cache", "total  "][..]),
        ("--techniques", &["memory.gradient_checkpointing: true", "TECHNIQUE", "EACH TECHNIQUE BY ITSELF"]),
        ("--batches", &["rollout.n=2 trainer.train_batch_size=8"]),
        ("--models", &["PUBLIC MODELS", "Qwen2.5-7B"]),
    ] {
        let said = succeeded(&bench.firebrick("plan", &["--budget", "7MiB", option]));
        for part in parts {
            assert!(said.contains(part), "{part:?} is not in:\n{said}");
        }
        assert!(said.len() > short.len(), "{option}");
        assert!(!said.contains("More: "), "{said}");
        refused(&bench.firebrick("plan", &["--json", option]), &["--json", option]);
    }
    for absent in ["PUBLIC MODELS", "EACH TECHNIQUE", "SAME NUMBER OF ROLLOUTS"] {
        assert!(!short.contains(absent), "{short}");
    }
}

#[test]
fn a_preset_s_values_are_shown_with_those_that_the_device_cannot_have() {
    let bench = Bench::new();
    let settings = ["memory.preset=constrained", "memory.head_rows=32"];
    let said = succeeded(&bench.firebrick("plan", &settings));
    for part in [
        "preset  constrained sets memory.activation_offload=true",
        "memory.train_tokens=4096",
        "rollout.max_num_seqs=64",
        "omitted: precision=bf16, because the CPU",
        "omitted: rollout.gpu_memory_utilization=0.5, because the CPU",
    ] {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
    let plan = json(&bench, &settings);
    assert_eq!(plan["preset"]["name"], "constrained");
    let set = &plan["preset"]["set"];
    assert_eq!(set["memory.moments"], "block8");
    assert_eq!(set.get("memory.head_rows"), None, "it is written");
    assert_eq!(plan["preset"]["left_out"].as_array().unwrap().len(), 2);
    assert_eq!(json(&bench, &[]).get("preset"), None);
}

#[test]
fn a_preset_is_planned_in_the_precision_that_it_sets_for_a_gpu() {
    let bench = Bench::new();
    let weights = |args: &[&str]| {
        let plan = json(&bench, &[&["device=cuda:0"], args].concat());
        let load = &plan["phases"][0]["categories"]["parameters"];
        load.as_u64().unwrap()
    };
    let full = weights(&["memory.preset=constrained", "precision=f32"]);
    assert_eq!(2 * weights(&["memory.preset=constrained"]), full);
    assert!(full > 0);
    let balanced = weights(&["memory.preset=balanced"]);
    assert_eq!(balanced, weights(&[]), "it sets no precision");
}

#[test]
fn public_models_are_printed_in_two_precisions() {
    let said = succeeded(&Bench::new().firebrick("plan", &["--models"]));
    let rows = said.lines().filter(|line| line.contains(" billion"));
    assert_eq!(rows.count(), 16, "eight models in two precisions:\n{said}");
}

#[test]
fn json_has_phases_whose_categories_add_up_and_the_plan() {
    let bench = Bench::new();
    // by default a CPU's sampler has the trainer's log-probs, which need no pass
    let plan = json(&bench, &["update.old_log_probs=trainer"]);
    let peak = plan["peak_bytes"].as_u64().unwrap();
    let phases = plan["phases"].as_array().unwrap();
    let names: Vec<&str> = phases.iter().map(|p| p["name"].as_str().unwrap()).collect();
    for name in ["load", "rollout", "score", "backward", "optimizer"] {
        assert!(names.contains(&name), "{names:?}");
    }
    for phase in phases {
        let total = phase["total_bytes"].as_u64().unwrap();
        let categories = phase["categories"].as_object().unwrap().values();
        let sum: u64 = categories.map(|b| b.as_u64().unwrap()).sum();
        assert_eq!(sum, total, "{phase}");
        assert!(total <= peak);
    }
    assert!(plan["plan"]["models"]["policy"]["segments"].is_array());
    assert_eq!(plan["budget_bytes"], Value::Null);
}

#[test]
fn a_budget_on_the_command_line_wins_and_less_of_it_never_predicts_more() {
    let bench = Bench::new();
    let peak = |args: &[&str]| json(&bench, args)["peak_bytes"].as_u64().unwrap();
    let free = peak(&[]);
    let tight = peak(&["--budget", "7MiB", "memory.budget=1GiB"]);
    assert!(tight <= 7 << 20 && tight <= free, "{tight} of {free}");
}

/// Which is known of a CPU on Linux.
#[test]
#[cfg(target_os = "linux")]
fn a_budget_may_be_what_the_device_has() {
    let bench = Bench::new();
    let plan = json(&bench, &["memory.budget=auto"]);
    let budget = plan["budget_bytes"].as_u64().expect("a budget");
    assert!(plan["peak_bytes"].as_u64().unwrap() < budget);
}

#[test]
fn where_nothing_fits_it_says_by_how_much_and_what_would_do() {
    let bench = Bench::new();
    let output = bench.firebrick("plan", &["--budget", "4MiB"]);
    refused(&output, &["no plan fits 4.00 MiB", "too much", "a budget of"]);
    let output = bench.firebrick("plan", &["--budget", "much"]);
    refused(&output, &["much", "8GiB"]);
}

#[test]
fn a_model_needs_no_weights_to_be_planned() {
    let bench = Bench::new();
    let config = r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-6}"#;
    bench.write("model/config.json", config);
    let model = format!("model.path={}", bench.path("model").display());
    let plan = json(&bench, &[&model, "model.arch=null"]);
    let load = &plan["phases"][0]["categories"]["parameters"];
    assert_eq!(load.as_u64().unwrap(), 4 * 6_738_415_616, "6.7 billion numbers in f32");
}

#[test]
fn several_devices_are_arithmetic_and_each_holds_its_share() {
    let bench = Bench::new();
    let recompute = "memory.gradient_checkpointing=true";
    let alone = json(&bench, &[recompute]);
    for several in ["parallel", "communication", "other_degrees"] {
        assert_eq!(alone.get(several), None);
    }
    let fsdp = ["--data-parallel", "4", "--zero-stage", "3", recompute];
    let shared = json(&bench, &fsdp);
    assert_eq!(shared["parallel"]["data"], 4);
    assert_eq!(shared["parallel"]["zero"], "stage3");
    for key in alone.as_object().unwrap().keys() {
        assert!(shared.get(key).is_some(), "{key} is gone");
    }
    // the ranks that a configuration is written for
    let ranks = ["trainer.nnodes=2", "trainer.n_gpus_per_node=2", "memory.zero_stage=3", recompute];
    assert_eq!(json(&bench, &ranks)["phases"], shared["phases"]);
    let held = |plan: &Value, phase: &str, category: &str| {
        let phases = plan["phases"].as_array().unwrap();
        let phase = phases.iter().find(|p| p["name"] == phase).unwrap();
        phase["categories"][category].as_u64().unwrap_or(0)
    };
    for (phase, category) in [("optimizer", "parameters"), ("optimizer", "moments")] {
        let whole = held(&alone, phase, category);
        assert!(whole > 0);
        assert_eq!(held(&shared, phase, category), whole.div_ceil(4));
    }
    assert_eq!(held(&alone, "backward", "communication"), 0);
    assert!(held(&shared, "backward", "communication") > 0);
    let batch = &shared["batch"];
    assert_eq!(batch["effective_batch"], 16);
    assert_eq!(batch["micro_batch"].as_u64().unwrap() * batch["accumulation"].as_u64().unwrap(), 4);

    let shown = [&fsdp[..], &["--phases"]].concat();
    let said = succeeded(&bench.firebrick("plan", &shown));
    for part in ["spread  4 devices: data 4 (ZeRO-3)", "are per device", "communication"] {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
    let tight = [&fsdp[..], &["--budget", "6MiB"]].concat();
    assert!(json(&bench, &tight)["peak_bytes"].as_u64().unwrap() <= 6 << 20);
}

#[test]
fn a_plan_for_devices_that_share_sequences_says_what_runs_it() {
    let bench = Bench::new();
    let said = succeeded(&bench.firebrick("plan", &["--sequence-parallel", "2", "--output", "plan.json"]));
    for part in ["spread  2 devices: sequence 2", "mpirun -n 2"] {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
    let configured = json(&bench, &["memory.ulysses_sequence_parallel_size=2"]);
    assert_eq!(configured["parallel"]["sequence"], 2);
    let output = bench.firebrick("train", &["--plan", "plan.json"]);
    refused(
        &output,
        &["was made for 2 devices: sequence 2", "memory.ulysses_sequence_parallel_size is 1; set it to 2"],
    );
}

#[test]
fn degrees_that_divide_nothing_are_refused() {
    let bench = Bench::new();
    for (args, expected) in [
        (&["--data-parallel", "0"][..], "at least 1"),
        (&["--data-parallel", "17"], "16 sequences"),
        (&["--zero-stage", "2"], "data-parallel degree should be at least 2"),
        (&["--zero-stage", "4"], "0..=3"),
        (&["--tensor-parallel", "3"], "2 key/value heads"),
        (&["--tensor-parallel", "2", "--sequence-parallel", "2"], "2 heads"),
        (&["--pipeline-parallel", "3"], "2 layers"),
    ] {
        refused(&bench.firebrick("plan", args), &[expected]);
    }
}

/// What a cluster of four CPUs in two machines is asked with.
const CLUSTER: [&str; 8] = ["--nodes", "2", "--gpus", "2", "--budget", "1GiB", "--pipeline-parallel", "1"];

#[test]
fn a_cluster_s_degrees_are_chosen_and_explained_in_twenty_lines() {
    let bench = Bench::new();
    let said = succeeded(&bench.firebrick("plan", &CLUSTER));
    for part in [
        "spread  4 devices: data 4",
        "run by `mpirun -n 4 firebrick train`",
        "cluster 2 machines x 2: host 0.75 GB/s inside, host 0.75 GB/s a device between (assumed; --link, --node-link)",
        "SENT",
        "messages of a device, a step: ",
        "* peak",
        "binds   memory: ",
        "others  data 4",
        "as settings: trainer.nnodes=2 trainer.n_gpus_per_node=2 ",
    ] {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
    assert!(said.lines().count() <= 20, "{said}");
    let plan = json(&bench, &CLUSTER);
    assert_eq!(plan["parallel"]["data"], 4);
    assert_eq!(plan["parallel"]["cluster"]["nodes"], 2);
    assert_eq!(plan["parallel"]["cluster"]["link"]["kind"], "host");
    let sent = plan["communication"].as_array().unwrap();
    assert!(sent.iter().all(|own| own["seconds"].as_f64().unwrap() > 0.0));
    assert!(plan["other_degrees"].as_array().unwrap().len() >= 2);
    // the machines of the configuration, where the option says devices alone
    let own = [&["trainer.nnodes=2"][..], &CLUSTER[2..]].concat();
    assert_eq!(json(&bench, &own), plan);
    // one machine's devices are nearer than two machines'
    let step = |args: &[&str]| -> f64 {
        let plan = json(&bench, args);
        let waits = plan["communication"].as_array().unwrap().iter();
        waits.map(|own| own["seconds"].as_f64().unwrap()).sum()
    };
    let links = ["--link", "10GB/s", "--node-link", "1MB/s", "--zero-stage", "1"];
    let near = [&["--nodes", "1", "--gpus", "4"][..], &CLUSTER[4..]].concat();
    assert!(step(&[&near[..], &links].concat()) < step(&[&CLUSTER[..], &links].concat()));
}

#[test]
fn a_cluster_s_plan_is_written_for_as_many_ranks_and_estimates_are_not_run() {
    let bench = Bench::new();
    let written = [&CLUSTER[..], &["--output", "plan.json"]].concat();
    let said = succeeded(&bench.firebrick("plan", &written));
    assert!(said.contains("`mpirun -n 4 firebrick train ... --plan plan.json`"), "{said}");
    let output = bench.firebrick("train", &["--plan", "plan.json"]);
    refused(&output, &["was made for 4 devices"]);
    let shared = ["--ulysses-sequence-parallel-size", "2"];
    let said = succeeded(&bench.firebrick("plan", &[&CLUSTER[..], &shared].concat()));
    for part in ["data 2", "sequence 2", "all_to_all"] {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
    assert!(!said.contains("an estimate"), "{said}");
    let sampled = ["--data-parallel", "4", "--rollout-tensor-parallel", "2"];
    let said = succeeded(&bench.firebrick("plan", &sampled));
    assert!(said.contains("data 4 x tensor 2 in sampling"), "{said}");
    assert!(said.contains("run by `mpirun -n 4"), "{said}");
    assert!(!said.contains("an estimate"), "{said}");
    let said = json(&bench, &sampled);
    let settings = said["settings"].as_array().unwrap();
    let own = "rollout.tensor_model_parallel_size=2";
    assert!(settings.iter().any(|setting| setting == own), "{settings:?}");
    // the key says the same
    let configured = json(&bench, &["--data-parallel", "4", own]);
    assert_eq!(configured["parallel"], said["parallel"]);
    let trained = ["--data-parallel", "2", "--tensor-parallel", "2"];
    let said = succeeded(&bench.firebrick("plan", &trained));
    assert!(said.contains("data 2 x tensor 2"), "{said}");
    assert!(said.contains("run by `mpirun -n 4"), "{said}");
    assert!(!said.contains("an estimate"), "{said}");
    let key = "memory.tensor_model_parallel_size=2";
    let said = json(&bench, &trained);
    let configured = json(&bench, &["--data-parallel", "2", key, own]);
    assert_eq!(configured["parallel"], said["parallel"]);
    let staged = ["--data-parallel", "2", "--pipeline-parallel", "2"];
    let said = succeeded(&bench.firebrick("plan", &staged));
    assert!(said.contains("data 2 x pipeline 2"), "{said}");
    assert!(!said.contains("an estimate"), "{said}");
    let both = ["--tensor-parallel", "2", "--pipeline-parallel", "2"];
    let said = succeeded(&bench.firebrick("plan", &both));
    assert!(said.contains("an estimate: "), "{said}");
}

#[test]
fn clusters_and_links_that_cannot_be_are_refused() {
    let bench = Bench::new();
    let tight = ["--nodes", "2", "--gpus", "2", "--budget", "3MiB"];
    for (args, expected) in [
        (&["--gpus", "0"][..], "--gpus"),
        (&["--nodes", "0"], "--nodes"),
        (&["--nodes", "-2"], "-2"),
        (&["--gpus", "2", "--budget", "1GiB", "--link", "nvlink9"], "unknown link \"nvlink9\""),
        (&["--gpus", "2", "--budget", "1GiB", "--node-link", "50GB"], "50GB/s"),
        (
            &["--gpus", "2", "--budget", "1GiB", "--tensor-parallel", "3"],
            "2 devices, and no degrees match them with tensor 3",
        ),
        (&["--gpus", "2", "--budget", "1GiB", "--data-parallel", "4"], "data 4"),
        (&["--gpus", "17", "--budget", "1GiB", "--sequence-parallel", "1"], "16 sequences"),
        (&["--data-parallel", "4", "--rollout-tensor-parallel", "3"], "of sampling is 3"),
        (&["--gpus", "2", "device=wgpu:0"], "run on cpu and cuda"),
        (&tight, "no plan fits 3.00 MiB"),
        (&tight, "which comes closest"),
    ] {
        refused(&bench.firebrick("plan", args), &[expected]);
    }
}

/// A build that knows no card cannot say how much memory one has.
#[test]
#[cfg(not(feature = "cuda"))]
fn a_cluster_of_unknown_devices_needs_a_budget() {
    let bench = Bench::new();
    let args = ["--nodes", "2", "--gpus", "8", "device=cuda:0"];
    refused(&bench.firebrick("plan", &args), &["--budget 80GiB"]);
}
