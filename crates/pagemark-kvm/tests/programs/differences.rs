//! What the documents say that differs in the machine is what differs.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

use super::{MACHINE, compiled, dir, lacking, output};

/// The exit status of the program that cannot show a feature here.
const CANNOT: i32 = 77;

/// A row of the table that a program shows.
struct Shown {
    /// The beginning of the row's first cell.
    feature: &'static str,
    /// What the row says of outside and inside.
    cells: [&'static str; 2],
    /// The argument of the program.
    argument: &'static str,
    /// What it prints, or the signals of which one ends it.
    results: [Printed; 2],
}

enum Printed {
    Line(&'static str),
    Signal(&'static [i32]),
}

use Printed::{Line, Signal};

const SHOWN: &[Shown] = &[
    Shown {
        feature: "set-user-ID and set-group-ID programs",
        cells: ["run with those rights", "`EPERM`, with a report"],
        argument: "set-user-id",
        results: [Line("the user 65534"), Line("Operation not permitted")],
    },
    Shown {
        feature: "capabilities of a program's file",
        cells: ["the program has them", "not, with a report"],
        argument: "file-capabilities",
        results: [Line("capabilities 0x1"), Line("capabilities 0")],
    },
    // The monitor's file is not among those that the program allows.
    Shown {
        feature: "rules of Landlock",
        cells: [
            "hold for the program",
            "hold for the program (Linux 6.14) and the monitor's file, which must be allowed",
        ],
        argument: "landlock",
        results: [Line("executed"), Line("Permission denied")],
    },
    Shown {
        feature: "programs that may be executed and not read",
        cells: ["run", "`EACCES`, with a report"],
        argument: "not-readable",
        results: [Line("the user 65534"), Line("Permission denied")],
    },
    Shown {
        feature: "limits of processes",
        cells: [
            "count processes and threads",
            "count one thread more for each process: about half as many processes, with a report",
        ],
        argument: "processes",
        results: [
            Line("11 children: Resource temporarily unavailable"),
            Line("5 children: Resource temporarily unavailable"),
        ],
    },
    Shown {
        feature: "a process is known to have one thread",
        cells: ["Python 3.12 and later fork without a warning", "`os.fork()` warns of threads"],
        argument: "one-thread",
        results: [Line("Threads:\t1"), Line("Threads:\t2")],
    },
    Shown {
        feature: "children where no file may be open",
        cells: ["made", "`EAGAIN`, with a report"],
        argument: "no-descriptors",
        results: [Line("made"), Line("Resource temporarily unavailable")],
    },
    Shown {
        feature: "`RLIMIT_AS`",
        cells: ["limits the program", "counts 2.1 GiB of the monitor too; shows them"],
        argument: "addresses",
        results: [Line("the program's"), Line("more")],
    },
    Shown {
        feature: "the main stack",
        cells: ["at most as large as its limit allows", "1 GiB at most; what a lower limit has mapped stays"],
        argument: "stack",
        results: [Line("large"), Signal(&[libc::SIGSEGV])],
    },
    Shown {
        feature: "threads",
        cells: ["as many as limits allow", "1024 at most, with a report, and a descriptor each"],
        argument: "threads",
        results: [Line("1101 threads: Success"), Line("1024 threads: Resource temporarily unavailable")],
    },
    Shown {
        feature: "programs built with `-fsanitize=address`",
        cells: ["run", "end at the start"],
        argument: "high-addresses",
        results: [Line("mapped"), Line("Cannot allocate memory")],
    },
    Shown {
        feature: "hardware breakpoints",
        cells: ["counted", "never"],
        argument: "hardware-breakpoint",
        results: [Line("10 writes"), Line("0 writes")],
    },
    Shown {
        feature: "`LD_PRELOAD`, `LD_AUDIT`",
        cells: ["libraries are loaded once", "are loaded twice, and remain in the program alone"],
        argument: "preloaded",
        results: [Line("loaded 1 times, 1 remain"), Line("loaded 2 times, 1 remain")],
    },
    Shown {
        feature: "`/proc/self/auxv`",
        cells: ["the program's vector", "the monitor's"],
        argument: "auxiliary-vector",
        results: [Line("the program's"), Line("another")],
    },
    Shown {
        feature: "`/proc/PID/exe` in other forms",
        cells: ["leads to the program", "leads to the monitor"],
        argument: "link",
        results: [Line("differences"), Line("pagemark-kvm")],
    },
    Shown {
        feature: "`clone` with `CLONE_VFORK`",
        cells: ["waits for the child", "does not wait"],
        argument: "vfork",
        results: [Line("has ended"), Line("runs")],
    },
    Shown {
        feature: "segments of 32 bits",
        cells: ["code of 32 bits", "a signal"],
        argument: "32-bits",
        results: [Line("7"), Signal(&[libc::SIGILL, libc::SIGSEGV])],
    },
    Shown {
        feature: "SIGBUS of poisoned pages",
        cells: ["says which address was accessed", "says which page, and `BUS_MCEERR_AR`"],
        argument: "poison",
        results: [Line("the address"), Line("the page, code 4")],
    },
    Shown {
        feature: "mappings that may be written or executed and not read",
        cells: ["are shown so", "are shown as readable"],
        argument: "mapping",
        results: [Line("-w-p"), Line("rw-p")],
    },
    Shown {
        feature: "a program's own `fcntl` locks",
        cells: ["stay", "are dropped"],
        argument: "locks",
        results: [Line("locked"), Line("not locked")],
    },
];

/// A row that another program shows, which is linked with all that it needs.
const SHOWN_STATICALLY: Shown = Shown {
    feature: "`chroot` into a directory",
    cells: ["programs run", "`exec` fails with `ENOENT`, or ends with status 125"],
    argument: "change-root",
    results: [Line("the user 0"), Line("No such file or directory")],
};

/// The beginnings of the rows that no program shows, and why.
const NOT_SHOWN: &[(&str, &str)] = &[
    ("rules on execution of AppArmor", "a test does not change the system's rules"),
    ("programs of `binfmt_misc`", "a test does not change what the system executes"),
    ("writes of debuggers", "needs a tracker and a debugger"),
    ("uprobes of the host", "has a test of its own"),
    ("core files", "the system says where they go"),
    ("CPUID's leaves", "needs VMX or SVM"),
    ("locked memory", "waits for ever"),
    ("memory in more spans", "needs as much memory"),
];

/// The cells of each row of the table, without the reason.
fn table() -> Vec<[String; 3]> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/process-machine.md");
    let text = std::fs::read_to_string(path).expect("a document");
    let (_, part) = text.split_once("\n## What differs\n").expect("a section");
    let rows = part.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
    // The first row names the columns.
    let cells = rows.skip(1).map(|row| row.split(" | ").map(str::to_owned).collect::<Vec<_>>());
    let row = |cells: Vec<String>| cells.into_iter().take(3).collect::<Vec<_>>().try_into().expect("four columns");
    cells.map(row).collect()
}

#[test]
fn each_difference_is_shown_or_cannot_be() {
    let table = table();
    let shown = SHOWN.iter().chain([&SHOWN_STATICALLY]);
    for Shown { feature, cells, .. } in shown.clone() {
        let row = table.iter().find(|row| row[0].starts_with(feature));
        let row = row.unwrap_or_else(|| panic!("the table has no row {feature}"));
        assert_eq!([&row[1], &row[2]], [cells[0], cells[1]], "{feature}");
    }
    let known: Vec<&str> = shown.map(|shown| shown.feature).chain(NOT_SHOWN.iter().map(|row| row.0)).collect();
    let unknown: Vec<&String> =
        table.iter().map(|row| &row[0]).filter(|row| !known.iter().any(|known| row.starts_with(known))).collect();
    assert!(unknown.is_empty(), "no test knows: {unknown:#?}");
    assert_eq!(table.len(), known.iter().collect::<BTreeSet<_>>().len());
}

/// Runs `program` outside and inside, and says what does not have the result that is stated.
fn differing(program: &Path, library: &Path, shown: &Shown) -> Option<String> {
    let run = |machine: Option<&str>| -> Output {
        let dir = dir();
        // Programs of other users are executed there.
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).expect("our directory");
        let mut command = Command::new("env");
        command.current_dir(dir.path()).env("LC_ALL", "C").env_remove("LOADED");
        if shown.argument == "preloaded" {
            let mut preload = std::ffi::OsString::from("LD_PRELOAD=");
            preload.push(library);
            command.arg(preload);
        }
        command.args(machine).arg(program).arg(shown.argument);
        output(command)
    };
    let outputs = [run(None), run(Some(MACHINE))];
    if outputs.iter().any(|output| output.status.code() == Some(CANNOT)) {
        eprintln!("not shown here: {}", shown.feature);
        return None;
    }
    let is_right = |(output, result): (&Output, &Printed)| match result {
        Line(line) => output.status.success() && output.stdout == format!("{line}\n").as_bytes(),
        Signal(signals) => output.status.signal().is_some_and(|signal| signals.contains(&signal)),
    };
    let is_reported = outputs[1].stderr.starts_with(b"pagemark-kvm: ");
    let is_as_stated = outputs.iter().zip(&shown.results).all(is_right)
        && is_reported == shown.cells[1].contains("with a report")
        && outputs[0].stderr.is_empty();
    (!is_as_stated).then(|| format!("{}: {outputs:#?}", shown.feature))
}

#[test]
fn what_differs_is_what_the_table_states() {
    if let Some(reason) = lacking() {
        pagemark_testing::skip!("no machine under KVM: {reason}");
    }
    let dir = dir();
    let library = compiled("counted", dir.path(), &["-shared", "-fPIC"]);
    let program = compiled("differences", dir.path(), &["-pthread"]);
    // `link` shows its name.
    let named = dir.path().join("differences");
    std::fs::copy(program, &named).expect("a copy");
    let linked = compiled("differences", dir.path(), &["-pthread", "-static"]);
    let mut wrong: Vec<String> = SHOWN.iter().filter_map(|shown| differing(&named, &library, shown)).collect();
    wrong.extend(differing(&linked, &library, &SHOWN_STATICALLY));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
