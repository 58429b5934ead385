//! Models and datasets by name: fetched from a server with the Hub's routes, kept in the layout of Python's cache,
//! found there without a network.

mod files;

use super::{Bench, firebrick, program, refused, stderr, succeeded};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Between a repository and its file in this server's own names.
const SEPARATOR: &str = "~~";

/// A server with the Hub's routes: `/api/KIND/OWNER/NAME/revision/REVISION` and `…/resolve/REVISION/FILE`.
struct Hub {
    address: String,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// Files by repository, as URLs name it.
    repos: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
    /// The token that is asked for.
    token: Option<String>,
    /// A file whose first download breaks off halfway.
    broken: Mutex<Option<String>>,
    /// Downloads of weights that are still to be damaged on the way.
    damaged: Mutex<usize>,
    /// Each request: its path and its range.
    requests: Mutex<Vec<(String, String)>>,
}

impl Hub {
    fn serve(shared: Shared) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let shared = Arc::new(shared);
        let own = Arc::clone(&shared);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let own = Arc::clone(&own);
                // a client that goes away ends its own connection only
                std::thread::spawn(move || answer(stream, &own));
            }
        });
        Self { address, shared }
    }

    /// Makes a command ask this server, with a cache of its own.
    fn reach(&self, mut command: Command, cache: &Path) -> Command {
        clean(&mut command, cache).env("HF_ENDPOINT", &self.address);
        command
    }

    fn ranges_of(&self, file: &str) -> Vec<String> {
        let requests = self.shared.requests.lock().unwrap();
        let own = requests.iter().filter(|(path, _)| path.ends_with(file));
        own.map(|(_, range)| range.clone()).collect()
    }
}

/// Takes away what the surroundings say of the Hub.
fn clean<'a>(command: &'a mut Command, cache: &Path) -> &'a mut Command {
    for name in [
        "HF_ENDPOINT",
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "HF_TOKEN_PATH",
        "ALL_PROXY",
        "all_proxy",
        "HTTP_PROXY",
        "http_proxy",
        "HTTPS_PROXY",
        "https_proxy",
    ] {
        command.env_remove(name);
    }
    command.env("HF_HOME", cache)
}

fn answer(stream: TcpStream, hub: &Shared) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let request = lines.next().unwrap().unwrap();
    let headers: BTreeMap<String, String> = lines
        .map_while(Result::ok)
        .take_while(|line| !line.is_empty())
        .filter_map(|line| {
            let (name, value) = line.split_once(':')?;
            Some((name.to_lowercase(), value.trim().to_owned()))
        })
        .collect();
    let path = request.split(' ').nth(1).unwrap();
    let path = path.split('?').next().unwrap();
    let range = headers.get("range").cloned().unwrap_or_default();
    let seen = (path.to_owned(), range.clone());
    hub.requests.lock().unwrap().push(seen);
    let allowed = hub.token.as_ref().is_none_or(|token| {
        let given = headers.get("authorization");
        given.is_some_and(|given| *given == format!("Bearer {token}"))
    });
    if !allowed {
        respond(stream, "401 Unauthorized", &[], b"{}", None);
    } else if let Some(rest) = path.strip_prefix("/api/") {
        list(stream, hub, rest);
    } else if let Some(file) = path.strip_prefix("/cdn/") {
        // where large files lie: another address, which knows neither commits nor names
        send(stream, hub, file, &range, &[]);
    } else {
        let file = path[1..].replace(&format!("/resolve/{COMMIT}/"), SEPARATOR);
        if file.ends_with(".safetensors") {
            let location = format!("Location: http://{}/cdn/{file}", headers["host"]);
            let etag = format!("X-Linked-Etag: \"{}\"", etag(&file));
            let headers = [location, etag, format!("X-Repo-Commit: {COMMIT}")];
            respond(stream, "302 Found", &headers, b"", None);
        } else {
            let headers = [format!("ETag: \"{}\"", etag(&file)), format!("X-Repo-Commit: {COMMIT}")];
            send(stream, hub, &file, &range, &headers);
        }
    }
}

/// The name of a blob: letters and digits, as hashes are.
fn etag(file: &str) -> String {
    let letter = |c: char| if c.is_ascii_alphanumeric() { c } else { '0' };
    file.chars().map(letter).collect()
}

fn list(stream: TcpStream, hub: &Shared, path: &str) {
    let (repo, _) = path.split_once("/revision/").unwrap();
    let repo = repo.strip_prefix("models/").unwrap_or(repo);
    let Some(files) = hub.repos.get(repo) else {
        return respond(stream, "404 Not Found", &[], b"{}", None);
    };
    let sibling = |(name, bytes): (&String, &Vec<u8>)| {
        let mut file = serde_json::json!({"rfilename": name, "size": bytes.len()});
        if name.ends_with(".safetensors") {
            file["lfs"] = serde_json::json!({"sha256": files::sha256(bytes), "size": bytes.len()});
        }
        file
    };
    let siblings: Vec<_> = files.iter().map(sibling).collect();
    let listing = serde_json::json!({"sha": COMMIT, "siblings": siblings}).to_string();
    respond(stream, "200 OK", &[], listing.as_bytes(), None);
}

fn send(stream: TcpStream, hub: &Shared, file: &str, range: &str, headers: &[String]) {
    let (repo, name) = file.split_once(SEPARATOR).unwrap();
    let bytes = &hub.repos[repo][name];
    let (from, to) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
    let from: usize = from.parse().unwrap();
    let to = to.parse().map_or(bytes.len(), |last: usize| last + 1);
    let mut headers = headers.to_vec();
    headers.push(format!("Content-Range: bytes {from}-{}/{}", to - 1, bytes.len()));
    let mut broken = hub.broken.lock().unwrap();
    let breaks = to - from > 1 && broken.as_deref() == Some(name);
    if breaks {
        *broken = None;
    }
    let most = breaks.then_some((to - from) / 2);
    let mut sent = bytes[from..to].to_vec();
    let mut damaged = hub.damaged.lock().unwrap();
    if *damaged > 0 && to - from > 1 && name.ends_with(".safetensors") {
        *damaged -= 1;
        // as many bytes, one of them another
        let last = sent.len() - 1;
        sent[last] ^= 1;
    }
    drop(damaged);
    respond(stream, "206 Partial Content", &headers, &sent, most);
}

fn respond(mut stream: TcpStream, status: &str, headers: &[String], body: &[u8], most: Option<usize>) {
    let mut head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n", body.len());
    for header in headers {
        head.push_str(header);
        head.push_str("\r\n");
    }
    let sent = most.unwrap_or(body.len());
    // whoever has what it wants may have hung up
    let _ = stream.write_all(format!("{head}\r\n").as_bytes());
    let _ = stream.write_all(&body[..sent]);
    let _ = stream.flush();
}

/// A model of the fixtures, as a repository.
fn model() -> BTreeMap<String, Vec<u8>> {
    let folder = crate::support::fixtures().join("models/llama-rope-llama3");
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            files.insert(name, std::fs::read(path).unwrap());
        }
    }
    files.insert("README.md".into(), b"what is not needed is not fetched".to_vec());
    files
}

const ROW: &str = "{\"prompt\": [{\"role\": \"user\", \"content\": \"Jean has 30\"}], \"reward_model\": {\"ground_truth\": \"30\"}}\n";

fn rows() -> BTreeMap<String, Vec<u8>> {
    let rows = |name: &str, rows: usize| (name.to_owned(), ROW.repeat(rows).into_bytes());
    BTreeMap::from([rows("main/train.jsonl", 3), rows("main/test.jsonl", 2), rows("other/train.jsonl", 9)])
}

fn repos() -> Shared {
    Shared {
        repos: BTreeMap::from([("owner/tiny".to_owned(), model()), ("datasets/owner/rows".to_owned(), rows())]),
        ..Shared::default()
    }
}

const TASK: &str = "task={kind: dataset, train: 'hf://datasets/owner/rows/main', validation: 'hf://datasets/owner/rows/main', \
                    rewards: [{kind: exact}]}";

fn look(bench: &Bench, more: &[&str]) -> Command {
    let settings = ["model.arch=null", "model.path=owner/tiny", TASK];
    bench.command("data", &[&settings[..], more].concat())
}

#[test]
fn a_model_and_a_dataset_are_fetched_once_and_found_offline() {
    let (bench, hub) = (Bench::new(), Hub::serve(repos()));
    let cache = bench.path("cache");
    let text = succeeded(&hub.reach(look(&bench, &[]), &cache).output().unwrap());
    for part in ["training: 3 rows", "validation: 2 rows", "<|begin_of_text|>", "answer: 30"] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    let repo = cache.join("hub/models--owner--tiny");
    let config = repo.join("snapshots").join(COMMIT).join("config.json");
    let blob = std::fs::read_link(&config).unwrap();
    assert!(blob.starts_with("../../blobs"), "a link, as Python makes it: {}", blob.display());
    assert_eq!(std::fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
    assert_eq!(std::fs::read_dir(repo.join("refs")).unwrap().count(), 1);
    assert!(!repo.join("snapshots").join(COMMIT).join("README.md").exists());
    assert!(hub.ranges_of("model.safetensors").is_empty(), "no weights are read");

    let before = hub.ranges_of("config.json").len();
    succeeded(&hub.reach(look(&bench, &[]), &cache).output().unwrap());
    assert_eq!(hub.ranges_of("config.json").len(), before, "nothing is fetched again");

    let mut offline = look(&bench, &[]);
    clean(&mut offline, &cache).env("HF_HUB_OFFLINE", "1");
    assert_eq!(succeeded(&offline.output().unwrap()), text);
    // a server that is not there is as good as none
    let mut unreachable = look(&bench, &[]);
    clean(&mut unreachable, &cache).env("HF_ENDPOINT", "http://127.0.0.1:1");
    let output = unreachable.output().unwrap();
    assert_eq!(succeeded(&output), text);
    assert!(stderr(&output).contains("taken from the cache"), "{}", stderr(&output));
}

#[test]
fn a_new_configuration_names_a_model_and_a_dataset_of_the_hub_and_has_no_mistakes() {
    let (bench, hub) = (Bench::new(), Hub::serve(repos()));
    let reached = |args: &[&str]| {
        let mut command = program(args);
        command.current_dir(bench.path("")).stdin(Stdio::null());
        let mut command = hub.reach(command, &bench.path("cache"));
        command.output().unwrap()
    };
    let new = "new --model owner/tiny --data hf://datasets/owner/rows/main --reward number --memory 4GiB --device cpu";
    succeeded(&reached(&new.split(' ').collect::<Vec<_>>()));
    let text = bench.read("run.yaml");
    for part in [
        "path: \"owner/tiny\"",
        "train: \"hf://datasets/owner/rows/main\"",
        // its own rows to validate on, which the folder has
        "validation: \"hf://datasets/owner/rows/main\"",
        "prompt_field: \"prompt\"",
        "answer_field: \"reward_model.ground_truth\"",
        "kind: number",
    ] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
    let said = succeeded(&reached(&["config", "check", "run.yaml"]));
    assert!(said.contains("no mistakes"), "{said}");
    let wrong = "new --model owner/tiny --data hf://datasets/owner/rows --reward number --memory 4GiB --device cpu --output b.yaml";
    refused(&reached(&wrong.split(' ').collect::<Vec<_>>()), &["several folders", "main, other"]);
}

#[test]
fn weights_come_through_a_redirect_and_go_on_where_they_broke_off() {
    let mut shared = repos();
    shared.broken = Mutex::new(Some("model.safetensors".to_owned()));
    let (bench, hub) = (Bench::new(), Hub::serve(shared));
    let local = crate::support::fixtures().join("models/llama-rope-llama3");
    let generate = |model: &str| {
        let args = ["generate", "--model", model, "--prompt", "Jean has", "--device", "cpu", "--max-new-tokens", "8"];
        program(&args)
    };
    let expected = succeeded(&firebrick(&[
        "generate",
        "--model",
        local.to_str().unwrap(),
        "--prompt",
        "Jean has",
        "--device",
        "cpu",
        "--max-new-tokens",
        "8",
    ]));
    let cache = bench.path("cache");
    let output = hub.reach(generate("owner/tiny@main"), &cache).output().unwrap();
    assert_eq!(succeeded(&output), expected);
    assert!(stderr(&output).contains("downloaded model.safetensors"), "{}", stderr(&output));
    let size = model()["model.safetensors"].len();
    let resumed = format!("bytes={}-", size / 2);
    let ranges = hub.ranges_of("model.safetensors");
    assert!(ranges.contains(&resumed), "{resumed} is not in {ranges:?}");
    let fetched = cache.join("hub/models--owner--tiny/snapshots").join(COMMIT);
    let bytes = std::fs::read(fetched.join("model.safetensors")).unwrap();
    assert_eq!(bytes, model()["model.safetensors"]);
}

#[test]
fn what_cannot_be_fetched_says_what_to_do() {
    let bench = Bench::new();
    let cache = bench.path("cache");
    let mut shared = repos();
    shared.token = Some("hf_right".to_owned());
    let hub = Hub::serve(shared);
    let with_token = |token: &str| {
        let mut command = hub.reach(look(&bench, &[]), &cache);
        command.env("HF_TOKEN", token).output().unwrap()
    };
    refused(&with_token("hf_wrong"), &["dataset owner/rows", "refused it", "HF_TOKEN"]);
    succeeded(&with_token("hf_right"));

    let open = Hub::serve(repos());
    let fresh = bench.path("fresh");
    let of = |more: &[&str]| open.reach(look(&bench, more), &fresh).output().unwrap();
    refused(&of(&["model.path=owner/none"]), &["model owner/none", "no such repository", "no local folder owner/none"]);
    refused(
        &of(&["task.train=owner/rows"]),
        &["dataset owner/rows", "several folders (main, other)", "hf://datasets/owner/name/other"],
    );
    let mut offline = look(&bench, &[]);
    clean(&mut offline, &bench.path("empty")).env("HF_HUB_OFFLINE", "1");
    refused(
        &offline.output().unwrap(),
        &["HF_HUB_OFFLINE is set", "hf download owner/rows --repo-type dataset", "task.train"],
    );
}
