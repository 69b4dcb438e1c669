//! The repository as a whole.

use super::*;
use crate::{Mechanism, PageTree, Store};

/// A checkpoint's description with one space.
fn manifest(job: &str, root: ContentId, pages: u64) -> Manifest {
    Manifest {
        job: job.into(),
        sequence: 0,
        taken_unix_us: 0,
        command: vec!["program".into()],
        mechanism: Mechanism::Full,
        kind: TargetKind::Memory,
        spaces: vec![SpaceRecord { pid: 1, name: "program".into(), root, pages, mappings: Vec::new() }],
        files: Vec::new(),
        state: Vec::new(),
        cost: Cost::default(),
    }
}

fn page(content: u64) -> [u8; PAGE_SIZE] {
    std::array::from_fn(|at| content.to_le_bytes()[at % 8] ^ (at as u8 & (content as u8)))
}

fn commit(repository: &Repository, job: &str, tree: &mut PageTree) -> Result<CheckpointInfo, RepositoryError> {
    let mut writer = repository.writer("a test", Duration::ZERO)?;
    let root = tree.save(&mut writer)?;
    writer.commit(manifest(job, root, tree.page_count()))
}

#[test]
fn what_is_committed_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let repository = Repository::create(&directory.path().join("repository")).unwrap();
    let mut tree = PageTree::new();
    let mut infos = Vec::new();
    for round in 0..30u64 {
        let mut writer = repository.writer("a test", Duration::ZERO).unwrap();
        for number in 0..40 {
            tree.set(number * 1000, writer.put(Kind::Page, &page(number * (round + 1))).unwrap());
        }
        let root = tree.save(&mut writer).unwrap();
        infos.push(writer.commit(manifest("job", root, tree.page_count())).unwrap());
    }
    for repository in [&repository, &Repository::open(repository.path()).unwrap()] {
        assert_eq!(repository.jobs().unwrap(), ["job"]);
        assert_eq!(repository.checkpoints("job").unwrap(), infos);
        for (round, info) in infos.iter().enumerate() {
            let checkpoint = repository.read("job", info.sequence).unwrap();
            assert_eq!(checkpoint.manifest.cost.written_bytes, info.written_bytes);
            let tree = PageTree::load(checkpoint.manifest.spaces[0].root, &checkpoint).unwrap();
            let mut content = [0; PAGE_SIZE];
            for number in 0..40 {
                checkpoint.get_page(tree.get(number * 1000), &mut content).unwrap();
                assert_eq!(content, page(number * (round as u64 + 1)));
            }
        }
    }
}
