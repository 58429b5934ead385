//! Links that were measured, in plans.

use super::{Bench, succeeded};
use firebrick::backends::DeviceSpec;
use firebrick::backends::device::open;
use firebrick::backends::profile;
use firebrick::spec::{DeviceProfile, Link, MeasuredLinks};
use serde_json::Value;

#[test]
fn plans_for_several_devices_take_links_that_ranks_have_measured() {
    let bench = Bench::new();
    let (_, info) = open(DeviceSpec::CPU).unwrap();
    let links = |bandwidth| Some(MeasuredLinks { inside: Some(Link::measured(bandwidth, 1e-5)), between: None });
    // where `devices --measure` leaves it
    let plain = |name: &str| name.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
    let file = format!("cache/firebrick/devices/{}.json", plain(&format!("cpu-{}", info.name)));
    let said = |links: Option<MeasuredLinks>, args: &[&str]| {
        let profile = DeviceProfile { links, ..profile::of(&info) };
        bench.write(&file, &serde_json::to_string(&profile).unwrap());
        let args = [&["--gpus", "2", "--budget", "1GiB"], args].concat();
        let mut command = bench.command("plan", &args);
        command.env("XDG_CACHE_HOME", bench.path("cache"));
        succeeded(&command.output().unwrap())
    };
    let assumed = said(None, &[]);
    assert!(assumed.contains("host 0.75 GB/s (assumed;"), "{assumed}");
    let measured = said(links(2.5e9), &[]);
    assert!(measured.contains("measured 2.5 GB/s\n"), "{measured}");
    // what is said counts more
    let named = said(links(2.5e9), &["--link", "10GB/s"]);
    assert!(named.contains("1 machine x 2: 10 GB/s\n"), "{named}");
    let waits = |bandwidth| {
        let report: Value = serde_json::from_str(&said(links(bandwidth), &["--json"])).unwrap();
        let sent = report["communication"].as_array().unwrap().clone();
        let seconds = sent.iter().map(|own| own["seconds"].as_f64().unwrap());
        seconds.sum::<f64>()
    };
    assert!(waits(1e6) > 2.0 * waits(1e9));
}

/// The degrees and the phases of a plan for two GPUs.
fn of_two_gpus(args: &[&str]) -> [Value; 2] {
    let bench = Bench::new();
    // large beside its rows, so that the sum of a unit's gradients is the peak
    let model = "model={arch: {model_type: llama, hidden_size: 256, intermediate_size: 2048, num_hidden_layers: 1, \
                 num_attention_heads: 4, max_position_embeddings: 64}}";
    let of_two = ["device=cuda:0", "--data-parallel", "2", "--json", model];
    let args = [&of_two, args].concat();
    let said = succeeded(&bench.firebrick("plan", &args));
    let report: Value = serde_json::from_str(&said).unwrap();
    ["parallel", "phases"].map(|part| report[part].clone())
}

#[test]
fn plans_of_nvidia_gpus_count_nccl_s_buffers_unless_values_pass_through_the_host() {
    let [nccl, phases] = of_two_gpus(&[]);
    assert_eq!(nccl["nccl"], true);
    let held = phases.to_string();
    assert!(held.contains("communication"), "{held}");
    for through_host in ["trainer.ddp_backend=mpi", "--link=host"] {
        let [degrees, phases] = of_two_gpus(&[through_host]);
        assert_eq!(degrees["nccl"], Value::Null, "{through_host}");
        assert_eq!(degrees["cluster"]["link"]["kind"], "host");
        let held = phases.to_string();
        assert!(!held.contains("communication"), "{through_host}: {held}");
    }
}
