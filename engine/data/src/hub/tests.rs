//! Names of repositories, environment variables, and the cache without a network.

use super::*;
use std::path::Path;

fn name(text: &str) -> HubName {
    HubName::of_path(Path::new(text), RepoKind::Model).expect(text)
}

/// A cache folder with one model at the commit of `main`.
fn cache(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("temporary folder");
    let repo = folder.path().join("models--owner--tiny");
    let commit = "0123456789abcdef0123456789abcdef01234567";
    for (file, text) in files {
        let path = repo.join("snapshots").join(commit).join(file);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("created");
        std::fs::write(path, text).expect("written");
    }
    std::fs::create_dir_all(repo.join("refs")).expect("created");
    std::fs::write(repo.join("refs/main"), commit).expect("written");
    folder
}

fn offline(folder: &Path) -> Hub {
    Hub::from_variables(|key| match key {
        "HF_HUB_CACHE" => Some(folder.display().to_string()),
        "HF_HUB_OFFLINE" => Some("1".to_owned()),
        _ => None,
    })
}

const WHOLE: [(&str, &str); 3] = [("config.json", "{}"), ("tokenizer.json", "{}"), ("model.safetensors", "weights")];

#[test]
fn a_name_has_an_owner_and_maybe_a_revision() {
    let plain = name("Qwen/Qwen2.5-0.5B-Instruct");
    assert_eq!((plain.repo.as_str(), plain.revision.as_str()), ("Qwen/Qwen2.5-0.5B-Instruct", "main"));
    assert_eq!(name("owner/tiny@v1.2").revision, "v1.2");
    let file = name("hf://datasets/openai/gsm8k@refs%2Fpr%2F1/main/train-*.parquet");
    assert_eq!(file.kind, RepoKind::Dataset);
    assert_eq!(file.repo, "openai/gsm8k");
    assert_eq!(file.revision, "refs/pr/1");
    assert_eq!(file.inside, "main/train-*.parquet");
}

#[test]
fn paths_and_files_are_no_names() {
    let of = |text: &str| HubName::of_path(Path::new(text), RepoKind::Model);
    for text in [
        "model",
        "/models/tiny",
        "./models/tiny",
        "../tiny",
        "a/b/c",
        "data/train.jsonl",
        "data/*.parquet",
        "~/tiny",
        "owner/tiny@",
    ] {
        assert_eq!(of(text), None, "{text}");
    }
    let here = tempfile::tempdir().expect("temporary folder");
    std::fs::create_dir_all(here.path().join("owner/tiny")).expect("created");
    assert!(!HubName::is_one("owner/tiny", here.path()), "it exists here");
    assert!(HubName::is_one("owner/other", here.path()));
}

#[test]
fn the_environment_is_read_as_in_python() {
    let hub = |pairs: &[(&str, &str)]| {
        Hub::from_variables(|key| {
            let pair = pairs.iter().find(|(name, _)| *name == key);
            pair.map(|(_, value)| (*value).to_owned())
        })
    };
    let at = |pairs| hub(pairs).folder;
    assert_eq!(at(&[("HF_HOME", "/h")]), Path::new("/h/hub"));
    assert_eq!(at(&[("HF_HOME", "/h"), ("HF_HUB_CACHE", "/c")]), Path::new("/c"));
    assert_eq!(at(&[("XDG_CACHE_HOME", "/x")]), Path::new("/x/huggingface/hub"));
    assert!(hub(&[("HF_HUB_OFFLINE", "True")]).offline);
    assert!(!hub(&[("HF_HUB_OFFLINE", "0")]).offline);
    let mirror = hub(&[("HF_ENDPOINT", "http://mirror/")]);
    assert_eq!(mirror.endpoint(), "http://mirror");
    let secret = hub(&[("HF_TOKEN", "hf_secret")]);
    assert!(!format!("{secret:?}").contains("hf_secret"));
}

#[test]
fn a_cached_model_is_found_without_a_network() {
    let folder = cache(&WHOLE);
    let hub = offline(folder.path());
    for wanted in [ModelFiles::Config, ModelFiles::Tokenizer, ModelFiles::All] {
        let folder = hub.model(&name("owner/tiny"), wanted).expect("cached");
        assert!(folder.join("config.json").is_file());
    }
    let commit = name("owner/tiny@0123456789abcdef0123456789abcdef01234567");
    assert!(hub.model(&commit, ModelFiles::All).is_ok());
}

#[test]
fn what_the_cache_lacks_is_named_with_what_to_do() {
    let refused = |files: &[(&str, &str)], model: &str| {
        let folder = cache(files);
        let error = offline(folder.path()).model(&name(model), ModelFiles::All);
        error.expect_err("refused").to_string()
    };
    let text = refused(&WHOLE, "owner/other");
    for part in
        ["model owner/other (Hugging Face Hub): HF_HUB_OFFLINE is set", "does not have it", "hf download owner/other"]
    {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    let text = refused(&WHOLE[..2], "owner/tiny");
    assert!(text.contains("no model*.safetensors"), "{text}");
    let index = r#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}"#;
    let half =
        [("config.json", "{}"), ("model.safetensors.index.json", index), ("model-00001-of-00002.safetensors", "half")];
    let text = refused(&half, "owner/tiny");
    assert!(text.contains("lacks 1 of 2 files model-…"), "{text}");
}
