//! Large programs: they compile code while they run, or compute with many threads and with what the
//! processor has of vectors.

use std::path::Path;

use super::{dir, find, lacking, same};

/// The directory of the programs' sources.
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs");

#[test]
#[ignore = "some minutes"]
fn sound_and_pictures() {
    need_machine!();
    let (dir, program) = (dir(), program!("ffmpeg"));
    let sources = "-v error -f lavfi -i testsrc2=size=320x240:rate=25 -f lavfi -i sine=frequency=440 -t 2 -bitexact";
    for codecs in ["-c:v libx264 -threads 3 -c:a aac", "-c:v libvpx-vp9 -threads 2 -c:a flac", "-c:v ffv1 -c:a libopus"]
    {
        // A digest of all that is written, and then of all that is read of it.
        let mut encode: Vec<&str> = sources.split(' ').chain(codecs.split(' ')).collect();
        encode.extend(["-f", "md5", "-"]);
        same(&program, &encode, dir.path());
        let file = encode.len() - 3;
        encode.splice(file.., ["-f", "matroska", "-y", "film"]);
        same(&program, &encode, dir.path());
        same(&program, &"-v error -threads 3 -i film -f framemd5 -".split(' ').collect::<Vec<_>>(), dir.path());
    }
}

#[test]
#[ignore = "some minutes"]
fn compilers() {
    need_machine!();
    let (dir, compiler) = (dir(), program!("cc"));
    for source in ["memory", "threads", "signals"] {
        let path = format!("{SOURCES}/{source}.c");
        for optimize in ["-O0", "-O3"] {
            same(&compiler, &["-w", optimize, "-S", "-o", "-", &path], dir.path());
        }
        // Its parts are programs that it starts.
        same(&compiler, &["-w", "-O2", "-pthread", "-o", "program", &path], dir.path());
        same(program!("sha256sum"), &["program"], dir.path());
    }
}

#[test]
#[ignore = "some minutes"]
fn java() {
    need_machine!();
    let (dir, compiler, java) = (dir(), program!("javac"), program!("java"));
    let source = format!("{SOURCES}/Trees.java");
    same(&compiler, &["-d", ".", &source], dir.path());
    for collector in ["Serial", "Parallel", "G1", "Z", "Shenandoah"] {
        let collector = format!("-XX:+Use{collector}GC");
        same(&java, &["-Xmx300m", &collector, "Trees"], dir.path());
    }
    same(&java, &["-Xmx300m", "-Xint", "Trees"], dir.path());
}

#[test]
#[ignore = "some minutes"]
fn javascript() {
    need_machine!();
    let (dir, source) = (dir(), Path::new(SOURCES).join("workers.js"));
    same(program!("node"), &[&source.to_string_lossy()], dir.path());
}
