//! Values that a preset sets, values that the configuration keeps, and values that a device rejects.

use super::*;
use serde_json::json;

fn laid(written: Value) -> (Map<String, Value>, AppliedPreset) {
    let Value::Object(mut root) = written else {
        panic!("a configuration is an object");
    };
    let applied = AppliedPreset::merge_into(&mut root);
    (root, applied)
}

fn device(backend: Backend, capacity: Option<u64>, dtypes: Option<&[&str]>) -> DeviceAbilities {
    let profile = DeviceProfile { capacity_bytes: capacity, ..DeviceProfile::assumed(backend) };
    DeviceAbilities::new(&profile, dtypes)
}

/// The keys that a device cannot have.
fn beyond(preset: &str, device: &DeviceAbilities, planned: bool) -> Vec<&'static str> {
    let (_, applied) = laid(json!({ "memory": { "preset": preset } }));
    let beyond = applied.beyond(device, planned);
    assert!(beyond.iter().all(|(_, because)| !because.is_empty()), "{beyond:?}");
    beyond.into_iter().map(|(key, _)| key).collect()
}

#[test]
fn a_preset_reaches_the_whole_run() {
    let (root, applied) = laid(json!({ "memory": { "preset": "constrained" } }));
    assert_eq!(root["precision"], "bf16");
    assert_eq!(root["rollout"]["gpu_memory_utilization"], 0.5);
    assert_eq!(root["rollout"]["max_num_seqs"], 64);
    assert_eq!(root["memory"]["train_tokens"], 4096);
    assert_eq!(root["memory"]["reference"]["param_offload"], "idle");
    assert_eq!(applied.name, Some(Preset::Constrained));
    assert!(applied.left_out.is_empty());
    let settings = applied.settings();
    for setting in ["precision=bf16", "rollout.max_num_seqs=64", "memory.reference.param_offload=idle"] {
        assert!(settings.iter().any(|s| s == setting), "{settings:?}");
    }
}

#[test]
fn what_is_written_wins_wherever_it_stands() {
    for (path, section, key, value) in [
        ("precision", None, "precision", json!("f32")),
        ("rollout.gpu_memory_utilization", Some("rollout"), "gpu_memory_utilization", json!(0.25)),
        ("rollout.gpu_memory_utilization", Some("rollout"), "gpu_memory_utilization", Value::Null),
        ("rollout.max_num_seqs", Some("rollout"), "max_num_seqs", json!(7)),
    ] {
        for preset in Preset::ALL {
            let mut written = json!({ "memory": { "preset": preset } });
            match section {
                Some(section) => written[section] = json!({ key: value }),
                None => written[key] = value.clone(),
            }
            let (root, applied) = laid(written);
            let root = Value::Object(root);
            let written = section.map_or(&root, |section| &root[section]);
            assert_eq!(written[key], value, "{preset}: {path}");
            assert!(!applied.sets(path), "{preset}: {path}");
        }
    }
    let memory = json!({ "preset": "constrained", "head_rows": 32, "reference": { "score_tokens": 9 } });
    let (root, applied) = laid(json!({ "memory": memory }));
    assert_eq!(root["memory"]["head_rows"], 32);
    assert!(!applied.sets("memory.head_rows"));
    assert_eq!(root["memory"]["reference"], json!({ "param_offload": "idle", "score_tokens": 9 }));
}

#[test]
fn a_configuration_without_a_preset_stays_as_it_is() {
    for written in
        [json!({}), json!({ "memory": {} }), json!({ "memory": { "preset": "balance" } }), json!({ "memory": 3 })]
    {
        let (root, applied) = laid(written.clone());
        assert_eq!(Value::Object(root), written);
        assert_eq!(applied, AppliedPreset::default());
    }
}

#[test]
fn fast_sets_nothing_outside_memory() {
    let (root, _) = laid(json!({ "memory": { "preset": "fast" } }));
    assert_eq!(root.keys().collect::<Vec<_>>(), ["memory"]);
}

#[test]
fn a_preset_gives_way_to_keys_that_its_own_would_not_go_with() {
    let limited = json!({ "memory": { "preset": "huge" }, "rollout": { "kv_cache_memory_bytes": "1GiB" } });
    let (root, applied) = laid(limited);
    assert!(root["rollout"].get("gpu_memory_utilization").is_none());
    assert_eq!(applied.left_out.len(), 1);
    assert_eq!(applied.left_out[0].setting(), "rollout.gpu_memory_utilization=0.85");
    let no_limit = json!({ "memory": { "preset": "huge" }, "rollout": { "kv_cache_memory_bytes": null } });
    assert!(laid(no_limit).1.sets(SHARE));

    let full = json!({ "memory": { "preset": "huge" }, "rollout": { "precision": "f32" } });
    let (root, applied) = laid(full);
    assert!(!root.contains_key("precision"));
    assert_eq!(applied.left_out[0].setting(), "precision=bf16");
    let half = json!({ "memory": { "preset": "huge" }, "rollout": { "precision": "bf16" } });
    assert!(laid(half).1.sets(PRECISION));
}

#[test]
fn what_a_device_cannot_do_is_left_out_with_the_reason() {
    let size = Some(24 << 30);
    let dtypes: &[&str] = &["f32", "bf16", "f16"];
    let h100 = device(Backend::Cuda, size, Some(dtypes));
    assert!(beyond("constrained", &h100, false).is_empty());
    assert_eq!(beyond("constrained", &h100, true), [SHARE]);
    let old = device(Backend::Cuda, size, Some(&["f32", "f16"]));
    assert_eq!(beyond("huge", &old, false), [PRECISION]);
    let cpu = device(Backend::Cpu, size, Some(dtypes));
    assert_eq!(beyond("constrained", &cpu, false), [PRECISION, SHARE]);
    assert_eq!(beyond("balanced", &cpu, false), [SHARE]);
    assert!(beyond("fast", &cpu, false).is_empty());

    let (_, applied) = laid(json!({ "memory": { "preset": "huge" } }));
    let reasons = applied.beyond(&old, false);
    assert!(reasons[0].1.contains("f32 and f16"), "{reasons:?}");
}

#[test]
fn a_device_that_is_not_at_hand_does_what_all_of_its_kind_do() {
    for (backend, expected) in [
        (Backend::Cuda, &[SHARE][..]),
        (Backend::Metal, &[SHARE]),
        (Backend::Vulkan, &[PRECISION, SHARE]),
        (Backend::Wgpu, &[PRECISION, SHARE]),
        (Backend::Cpu, &[PRECISION, SHARE]),
    ] {
        let reasons = beyond("constrained", &device(backend, None, None), false);
        assert_eq!(reasons, expected, "{backend:?}");
    }
}

#[test]
fn only_the_preset_s_own_values_are_left_out() {
    let (_, mut applied) = laid(json!({ "memory": { "preset": "huge" }, "precision": "bf16" }));
    let cpu = device(Backend::Cpu, None, None);
    let keys: Vec<&str> = applied.beyond(&cpu, false).iter().map(|(key, _)| *key).collect();
    assert_eq!(keys, [SHARE]);
    applied.leave_out(PRECISION, "nothing");
    assert!(applied.left_out.is_empty());
    applied.leave_out(SHARE, "no size");
    assert!(!applied.sets(SHARE));
    assert_eq!(applied.left_out[0].because, "no size");
    let text = serde_json::to_string(&applied).expect("writes");
    let back: AppliedPreset = serde_json::from_str(&text).expect("reads");
    assert_eq!(back, applied);
}
