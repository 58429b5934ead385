//! Model folders and adapters: headers that lie, files elsewhere, tokenizers that explode.

use super::rows::MARK;
use super::{Bench, Job, Kind, Random, TERMINAL, any, damage, edit, link, nested, refused, write_sparse};
use serde_json::{Value, json};
use std::fs;

pub(super) const KINDS: &[Kind] = &[
    any("numbers of config.json", Job::Generate, |bench, random| {
        let config = bench.read("model/config.json");
        let keys: Vec<String> = serde_json::from_str::<serde_json::Map<String, Value>>(&config)
            .unwrap()
            .into_iter()
            .map(|(key, _)| key)
            .collect();
        let key = &keys[random.below(keys.len() as u64) as usize];
        let lines = config.lines().map(|line| {
            if line.contains(&format!("\"{key}\"")) {
                format!("\"{key}\": {},", random.number())
            } else {
                line.to_owned()
            }
        });
        let text = lines.collect::<Vec<_>>().join("\n").replace(",\n}", "\n}");
        bench.write("model/config.json", &text);
        Vec::new()
    }),
    refused("depth of a model's JSON", Job::Generate, |bench, random| {
        let name = random.pick(&["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]);
        let depth = random.power(8, 20);
        let text = match random.below(3) {
            0 => nested("{\"a\":", "1", "}", depth),
            1 => nested("[", "", "]", depth),
            _ => format!("{{\"a\": {}", "[".repeat(depth)),
        };
        bench.write(&format!("model/{name}"), &text);
        Vec::new()
    }),
    refused("size of a model's JSON", Job::Generate, |bench, random| {
        let name = random.pick(&["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]);
        write_sparse(bench, &format!("model/{name}"), random.power(24, 42) as u64);
        Vec::new()
    }),
    any("many values in a model's JSON", Job::Generate, |bench, random| {
        let name = random.pick(&["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]);
        let values = random.pick(&["0,", "[],", "{},", "\"a\","]).repeat(random.power(20, 23));
        edit(bench, &format!("model/{name}"), |config| config["extra"] = json!(0));
        let text = bench.read(&format!("model/{name}"));
        let text = text.replace("\"extra\":0", &format!("\"extra\":[{values}0]"));
        bench.write(&format!("model/{name}"), &text);
        Vec::new()
    }),
    refused("length of a header of safetensors", Job::Generate, |bench, random| {
        let mut bytes = fs::read(bench.path("model/model.safetensors")).unwrap();
        let length = random.pick(&[u64::MAX, 1 << 63, 1 << 40, 1 << 31, 600_000, 8, 0]);
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        fs::write(bench.path("model/model.safetensors"), bytes).unwrap();
        Vec::new()
    }),
    refused("a header of safetensors", Job::Generate, |bench, random| {
        bench_header(bench, "model/model.safetensors", random);
        Vec::new()
    }),
    any("a damaged safetensors file", Job::Generate, |bench, random| {
        let mut bytes = fs::read(bench.path("model/model.safetensors")).unwrap();
        for _ in 0..=random.below(4) {
            bytes[random.below(2000) as usize] = random.below(256) as u8;
        }
        fs::write(bench.path("model/model.safetensors"), bytes).unwrap();
        Vec::new()
    }),
    refused("a large header of safetensors", Job::Generate, |bench, random| {
        let length = random.power(24, 36) as u64;
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend(b"{");
        fs::write(bench.path("model/model.safetensors"), bytes).unwrap();
        let file = fs::OpenOptions::new().write(true).open(bench.path("model/model.safetensors")).unwrap();
        file.set_len(length + 8).unwrap();
        Vec::new()
    }),
    refused("an index of weights elsewhere", Job::Generate, |bench, random| {
        fs::rename(bench.path("model/model.safetensors"), bench.path("outside.safetensors")).unwrap();
        link(bench, "model/link.safetensors", "../outside.safetensors");
        let absolute = bench.path("outside.safetensors").display().to_string();
        let absolute = absolute.as_str();
        let name = random.pick(&[
            "../outside.safetensors",
            "link.safetensors",
            "/dev/zero",
            "a/../../outside.safetensors",
            absolute,
            "",
            ".",
        ]);
        bench.write("model/model.safetensors.index.json", &json!({"weight_map": {"lm_head.weight": name}}).to_string());
        Vec::new()
    }),
    refused("a file of a model that is a link to another folder", Job::Chat, |bench, random| {
        let name = random.pick(&[
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "model.safetensors",
            "generation_config.json",
        ]);
        bench.write("secret", MARK);
        let target = random.pick(&["../secret", "/etc/passwd", "/dev/zero", "/proc/self/environ"]);
        link(bench, &format!("model/{name}"), target);
        Vec::new()
    }),
    refused("weights that are a pickle", Job::Generate, |bench, random| {
        let name = random.pick(&["pytorch_model.bin", "model.pt", "consolidated.00.pth"]);
        fs::rename(bench.path("model/model.safetensors"), bench.path(&format!("model/{name}"))).unwrap();
        fs::write(bench.path(&format!("model/{name}")), PICKLE).unwrap();
        Vec::new()
    }),
    refused("a pickle with the name of weights", Job::Generate, |bench, random| {
        let name = random.pick(&["model.safetensors", "config.json", "tokenizer.json"]);
        fs::write(bench.path(&format!("model/{name}")), PICKLE).unwrap();
        Vec::new()
    }),
    any("numbers of a tokenizer", Job::Generate, |bench, random| {
        let number: Value = serde_json::from_str(random.number()).unwrap();
        let padding = json!({
            "strategy": {"Fixed": number}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0,
            "pad_token": "!",
        });
        let truncation = json!({"direction": "Right", "max_length": number, "strategy": "LongestFirst", "stride": 0});
        let (place, value) = match random.below(5) {
            0 => ("/model/vocab/!", number),
            1 => ("/added_tokens/0/id", number),
            2 => ("/truncation", truncation),
            3 => ("/padding", padding),
            _ => ("/model/dropout", number),
        };
        set(bench, "model/tokenizer.json", place, value)
    }),
    any("patterns of a tokenizer", Job::Generate, |bench, random| {
        let pattern = random.pick(&[
            "(a+)+$",
            "(a|a)*b",
            "((a{1,100}){1,100}){1,100}",
            "(?=(a+)+b)",
            "(.*)*\\1$",
            "\\p{L}{1,1000000}",
            "(",
            "a{99999999}",
        ]);
        let replace = random.below(2) == 0;
        edit(bench, "model/tokenizer.json", |tokenizer| {
            tokenizer["pre_tokenizer"] =
                json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
            if replace {
                let steps = vec![json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}); 40];
                tokenizer["normalizer"] = json!({"type": "Sequence", "normalizers": steps});
            }
        });
        vec!["--prompt".into(), "a".repeat(40) + "b"]
    }),
    any("parts of a tokenizer", Job::Generate, |bench, random| {
        let single = json!([{"SpecialToken": {"id": "none", "type_id": 0}}]);
        let vocab = json!([["a", -1e308], ["b", 0.0]]);
        let (place, value) = match random.below(7) {
            0 => ("/normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "////////////////////"})),
            1 => ("/model/merges", json!([["!", "no such token"]])),
            2 => ("/model", json!({"type": "Unigram", "unk_id": 99_999_999, "vocab": vocab, "byte_fallback": true})),
            3 => {
                let tokens = json!({"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}});
                ("/post_processor", tokens)
            }
            4 => {
                let decoder =
                    json!({"type": "CTC", "pad_token": TERMINAL, "word_delimiter_token": "", "cleanup": true});
                ("/decoder", decoder)
            }
            5 => ("/added_tokens/0/content", json!(TERMINAL)),
            _ => ("/pre_tokenizer", json!({"type": TERMINAL})),
        };
        set(bench, "model/tokenizer.json", place, value)
    }),
    any("a damaged tokenizer", Job::Generate, |bench, random| {
        damage(bench, "model/tokenizer.json", random);
        Vec::new()
    }),
    any("settings of a tokenizer", Job::Chat, |bench, random| {
        let value = match random.below(5) {
            0 => json!({"added_tokens_decoder": {"4294967295": {"content": "x"}}}),
            1 => json!({"eos_token": {"content": TERMINAL}}),
            2 => json!({"chat_template": [{"name": "a", "template": "b"}, TERMINAL]}),
            3 => json!({"added_tokens_decoder": {(TERMINAL): {}}}),
            _ => json!({"chat_template": {(TERMINAL): 1}}),
        };
        fs::remove_file(bench.path("model/chat_template.jinja")).unwrap();
        bench.write("model/tokenizer_config.json", &value.to_string());
        Vec::new()
    }),
    any("numbers of an adapter", Job::Adapter, |bench, random| {
        let key = random.pick(&["r", "lora_alpha", "lora_dropout"]);
        let number: Value = serde_json::from_str(random.number()).unwrap();
        edit(bench, "adapter/adapter_config.json", |config| config[key] = number);
        Vec::new()
    }),
    refused("modules of an adapter", Job::Adapter, |bench, random| {
        let modules = random.pick(&["(.*)*x", TERMINAL, "../../x", ""]);
        edit(bench, "adapter/adapter_config.json", |config| config["target_modules"] = json!([modules]));
        Vec::new()
    }),
    refused("a header of an adapter", Job::Adapter, |bench, random| {
        bench_header(bench, "adapter/adapter_model.safetensors", random);
        Vec::new()
    }),
    refused("an adapter that is a pickle or elsewhere", Job::Adapter, |bench, random| {
        let weights = bench.path("adapter/adapter_model.safetensors");
        fs::rename(&weights, bench.path("outside.safetensors")).unwrap();
        match random.below(3) {
            0 => {
                fs::write(bench.path("adapter/adapter_model.bin"), PICKLE).unwrap();
            }
            1 => link(bench, "adapter/adapter_model.safetensors", "../outside.safetensors"),
            _ => link(bench, "adapter/adapter_model.safetensors", "/dev/zero"),
        }
        Vec::new()
    }),
];

/// Sets a value of a JSON file.
fn set(bench: &Bench, name: &str, place: &str, value: Value) -> Vec<String> {
    edit(bench, name, |json| *json.pointer_mut(place).unwrap() = value);
    Vec::new()
}

/// What a pickle of weights runs when it is loaded.
const PICKLE: &[u8] = b"\x80\x04cos\nsystem\n(S'touch ran'\ntR.";

/// Replaces the header of a file by one that lies.
fn bench_header(bench: &Bench, name: &str, random: &mut Random) {
    let bytes = fs::read(bench.path(name)).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let names: Vec<String> = header.as_object().unwrap().keys().filter(|key| *key != "__metadata__").cloned().collect();
    let tensor = &names[random.below(names.len() as u64) as usize];
    let (big, other) = (u64::MAX, header[&names[0]]["data_offsets"].clone());
    let depth = nested("[", "", "]", random.power(8, 18));
    match random.below(12) {
        0 => header[tensor]["data_offsets"] = json!([big, big]),
        1 => header[tensor]["data_offsets"] = json!([1000, 10]),
        2 => header[tensor]["data_offsets"] = json!([0, 1_u64 << 62]),
        3 => header[tensor]["shape"] = json!([1_u64 << 32, 1_u64 << 32, 4]),
        4 => header[tensor]["shape"] = json!([big, 2]),
        5 => header[tensor]["shape"] = json!([0]),
        6 => header[tensor]["dtype"] = json!("U8"),
        7 => header[tensor]["shape"] = json!(vec![1; 1 << 16]),
        8 => drop(header.as_object_mut().unwrap().remove(tensor)),
        9 => header[TERMINAL] = json!({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
        10 => header[tensor]["data_offsets"] = if names[0] == *tensor { json!([4, 8]) } else { other },
        _ => header[tensor]["shape"] = json!("DEPTH"),
    }
    let header = header.to_string().replace("\"DEPTH\"", &depth);
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &bytes[8 + length..]].concat();
    fs::write(bench.path(name), bytes).unwrap();
}

/// An adapter of the folder `model`, of rank 2.
pub(super) fn write_adapter(bench: &Bench) {
    let config = json!({
        "peft_type": "LORA", "r": 2, "lora_alpha": 2, "lora_dropout": 0, "target_modules": ["down_proj"],
        "base_model_name_or_path": "model",
    });
    bench.write("adapter/adapter_config.json", &config.to_string());
    let [down, up] = [vec![0_u8; 4 * 2 * 160], vec![0_u8; 4 * 64 * 2]];
    let tensors = (0..2).flat_map(|layer| {
        let name = |part: &str| format!("base_model.model.model.layers.{layer}.mlp.down_proj.lora_{part}.weight");
        let view = |shape: Vec<usize>, data| {
            safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape, data).unwrap()
        };
        [(name("A"), view(vec![2, 160], &down)), (name("B"), view(vec![64, 2], &up))]
    });
    let bytes = safetensors::serialize(tensors, None).unwrap();
    fs::write(bench.path("adapter/adapter_model.safetensors"), bytes).unwrap();
}
