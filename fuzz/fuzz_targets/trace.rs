//! Traces of simulated machines, and the lists of their inputs.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pagemark_simulate::Results;
use pagemark_simulate::fuzzing::trace;
use pagemark_simulate::inputs::Input;

/// Blocks (instructions, accesses, columns), whether these are compressed, and a list of inputs.
type Trace<'a> = (Vec<(u8, u8, &'a [u8])>, bool, &'a [u8]);

fuzz_target!(|input: Trace| {
    let (blocks, is_stored, list) = input;
    if let Ok(inputs) = Input::read_all(list) {
        let mut again = Vec::new();
        inputs.iter().for_each(|input| input.append_to(&mut again));
        assert_eq!(again, list);
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), list).unwrap();
    let _ = Results::read(file.path());
    let blocks: Vec<_> = blocks.iter().map(|(i, a, columns)| (u32::from(*i), u32::from(*a), *columns)).collect();
    trace(file.path(), &blocks, is_stored);
});
