//! Damage of any kind is found, and only damage.

use super::*;
use firebrick_backends::collective::{Settings, Threads};

/// A folder with files of several kinds and sizes, and its index.
fn folder() -> tempfile::TempDir {
    let temp = tempfile::tempdir().unwrap();
    let file = |name: &str, len: usize| {
        let path = temp.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, (0..len).map(|i| (i * 31 % 251) as u8).collect::<Vec<_>>()).unwrap();
    };
    file("model/config.json", 300);
    file("model/model.safetensors", 3 * BUFFER + 7);
    file("trainer/state.json", 1);
    file("empty", 0);
    write(temp.path(), &World::default()).unwrap();
    temp
}

fn verdict(folder: &tempfile::TempDir) -> Verdict {
    verify(folder.path(), &World::default()).unwrap()
}

#[test]
fn the_checksum_of_a_file_is_that_of_its_bytes_however_it_is_divided() {
    let temp = folder();
    let path = temp.path().join("model/model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let whole = crc32c::crc32c(&bytes);
    assert_eq!(FileSum::read(temp.path(), "model/model.safetensors").unwrap().crc32c, whole);
    for split in [1, BUFFER, BUFFER + 1] {
        let (first, _) = crc_of_block(&path, 0, split as u64).unwrap();
        let (second, len) = crc_of_block(&path, split as u64, (bytes.len() - split) as u64).unwrap();
        assert_eq!(crc32c::crc32c_combine(first, second, len), whole);
    }
}

#[test]
fn every_changed_byte_and_every_truncation_is_damage_that_names_the_file() {
    let temp = folder();
    assert_eq!(verdict(&temp), Verdict::Whole);
    for name in ["model/config.json", "model/model.safetensors", "trainer/state.json"] {
        let path = temp.path().join(name);
        let bytes = fs::read(&path).unwrap();
        let damaged = |bytes: &[u8], finding: &str| {
            fs::write(&path, bytes).unwrap();
            let Verdict::Damaged(damage) = verdict(&temp) else { panic!("{name} is damaged") };
            assert!(damage.starts_with(&format!("{name}: expected ")) && damage.contains(finding), "{damage}");
        };
        for at in (0..bytes.len()).step_by(bytes.len() / 40 + 1) {
            let mut changed = bytes.clone();
            changed[at] ^= 1 << (at % 8);
            damaged(&changed, ", found ");
            damaged(&bytes[..at], &format!(", found {at} bytes"));
        }
        fs::remove_file(&path).unwrap();
        let Verdict::Damaged(damage) = verdict(&temp) else { panic!("{name} is missing") };
        assert!(damage.contains("found no such file"), "{damage}");
        fs::create_dir(&path).unwrap();
        assert!(matches!(verdict(&temp), Verdict::Damaged(_)));
        fs::remove_dir(&path).unwrap();
        fs::write(&path, bytes).unwrap();
    }
    assert_eq!(verdict(&temp), Verdict::Whole);
}

#[test]
fn every_changed_byte_of_the_index_is_damage_or_white_space() {
    let temp = folder();
    let path = temp.path().join(INDEX);
    let bytes = fs::read(&path).unwrap();
    for at in 0..bytes.len() {
        for change in [1, 0x20, 0x2a, 0x80] {
            let mut changed = bytes.clone();
            changed[at] ^= change;
            fs::write(&path, &changed).unwrap();
            let is_space = |byte: u8| byte.is_ascii_whitespace();
            let expected = is_space(bytes[at]) && is_space(changed[at]);
            assert_eq!(
                verdict(&temp) == Verdict::Whole,
                expected,
                "byte {at}: {:02x} as {:02x}",
                bytes[at],
                changed[at]
            );
        }
        fs::write(&path, &bytes[..at]).unwrap();
        assert!(matches!(verdict(&temp), Verdict::Damaged(_)), "the first {at} bytes");
    }
}

#[test]
fn an_index_of_another_version_is_refused_with_both() {
    let temp = folder();
    let mut index = Map::from_iter([("format".to_owned(), json!(FORMAT)), ("version".to_owned(), json!(2))]);
    index.insert(CHECKSUM.to_owned(), json!(checksum_of(&index).unwrap()));
    fs::write(temp.path().join(INDEX), json(&index).unwrap()).unwrap();
    let message = verify(temp.path(), &World::default()).unwrap_err().to_string();
    assert!(message.contains("in version 2") && message.contains("in version 1"), "{message}");
}

#[test]
fn other_files_are_refused_only_if_loading_could_read_them() {
    let temp = folder();
    fs::write(temp.path().join("model/notes.txt"), "a note").unwrap();
    assert_eq!(verdict(&temp), Verdict::Whole);
    for name in ["trainer/optimizer.index.json", "model/more.safetensors", "model/chat_template.jinja"] {
        let path = temp.path().join(name);
        fs::write(&path, "{}").unwrap();
        let message = verify(temp.path(), &World::default()).unwrap_err().to_string();
        assert!(message.contains(name) && message.contains("move it away"), "{message}");
        fs::remove_file(path).unwrap();
    }
}

#[test]
fn a_missing_index_is_damage_unless_an_earlier_version_wrote_the_state() {
    let temp = folder();
    fs::remove_file(temp.path().join(INDEX)).unwrap();
    assert_eq!(verdict(&temp), Verdict::Unverified);
    let state = trainer_state::TrainerState { checksums: true, ..Default::default() };
    fs::write(temp.path().join("trainer/state.json"), json(&state).unwrap()).unwrap();
    assert!(matches!(verdict(&temp), Verdict::Damaged(_)));
}

#[test]
fn ranks_divide_the_files_and_agree_on_index_and_verdict() {
    let temp = folder();
    let index = fs::read(temp.path().join(INDEX)).unwrap();
    let path = temp.path().join("model/model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let on_ranks = || Threads::run(3, Settings::default(), |rank| verify(temp.path(), &World::new(rank)).unwrap());
    let written = Threads::run(3, Settings::default(), |rank| write(temp.path(), &World::new(rank)).is_ok());
    assert!(written.iter().all(|written| *written == Ok(true)));
    assert_eq!(fs::read(temp.path().join(INDEX)).unwrap(), index);
    assert!(on_ranks().into_iter().all(|verdict| verdict == Ok(Verdict::Whole)));
    fs::write(&path, &bytes[1..]).unwrap();
    let alone = verdict(&temp);
    assert!(matches!(alone, Verdict::Damaged(_)));
    assert!(on_ranks().into_iter().all(|verdict| verdict.as_ref() == Ok(&alone)));
}

#[test]
fn a_model_in_a_checkpoint_is_verified_and_a_copy_is_not() {
    let temp = folder();
    let model = temp.path().join("model");
    check_model(&model).unwrap();
    // other parts do not matter
    fs::write(temp.path().join("trainer/state.json"), "{}").unwrap();
    check_model(&model).unwrap();
    let path = model.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[1..]).unwrap();
    let message = check_model(&model).unwrap_err().to_string();
    for part in ["model.safetensors: ", "expected 49159 bytes", "found 49158 bytes", "copy the folder out"] {
        assert!(message.contains(part), "{message}");
    }
    let copy = tempfile::tempdir().unwrap();
    fs::copy(&path, copy.path().join("model.safetensors")).unwrap();
    check_model(copy.path()).unwrap();
}
