//! What QEMU, which may be the process of another user, sends as a block server.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pagemark_vm::fuzzing::block_server;

/// What a server sends until the export is open: it has 8192 bytes, and both contexts.
fn opened() -> Vec<u8> {
    let reply = |option: u32, kind: u32, content: &[u8]| {
        let numbers = [option, kind, content.len() as u32].map(u32::to_be_bytes).concat();
        [&0x0003_e889_0455_65a9_u64.to_be_bytes()[..], &numbers, content].concat()
    };
    let context = |id: u32, name: &str| [&id.to_be_bytes()[..], name.as_bytes()].concat();
    [
        b"NBDMAGICIHAVEOPT\0\x03".to_vec(),
        reply(8, 1, &[]),
        reply(10, 4, &context(1, "base:allocation")),
        reply(10, 4, &context(2, "qemu:dirty-bitmap:written")),
        reply(10, 1, &[]),
        reply(7, 3, &[&[0, 0][..], &8192_u64.to_be_bytes(), &[0, 0]].concat()),
        reply(7, 1, &[]),
    ]
    .concat()
}

fuzz_target!(|bytes: &[u8]| {
    let Some((mode, rest)) = bytes.split_first() else { return };
    match mode % 4 {
        0 => block_server(rest),
        1 => block_server(&[&opened(), rest].concat()),
        // Chunks of any kind with the header as it must be, each with up to 63 bytes.
        _ => {
            let (mut stream, mut rest, mut cookie) = (opened(), rest, 1_u64);
            while let Some(([head, kind], after)) = rest.split_first_chunk() {
                let (payload, after) = after.split_at(after.len().min(usize::from(head & 63)));
                rest = after;
                let kind = u16::from(kind % 8) | u16::from(kind >> 7) << 15;
                stream.extend(0x668e_33ef_u32.to_be_bytes());
                stream.extend(u16::from(head >> 6 & 1).to_be_bytes());
                stream.extend(kind.to_be_bytes());
                stream.extend(cookie.to_be_bytes());
                stream.extend((payload.len() as u32).to_be_bytes());
                stream.extend(payload);
                cookie += u64::from(head >> 6 & 1);
            }
            block_server(&stream);
        }
    }
});
