//! The disk of a machine that runs again: its content at the checkpoint, read from the store when
//! the machine reads it, and what the machine writes, in memory. Served to QEMU by the NBD
//! protocol.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pagemark::{ByteCount, ContentId, PAGE_SIZE, PageNumber, PageTree, Store};
use pagemark_linux::scratch_directory::{self, Purpose, ScratchDirectory};

use crate::checkpoint::nbd::{
    ACKNOWLEDGED, DISCONNECT, FLUSH, GO, INFORMATION, OPTION_ERROR, OPTION_MAGIC, OPTION_REPLY_MAGIC, READ,
    REQUEST_MAGIC, SIMPLE_REPLY_MAGIC, WRITE, WRITE_ZEROES,
};
use crate::error::{Error, ErrorKind, Object, Result};
use crate::qemu::drive::{DiskImage, names_file, with_served_file};
use crate::restore::images::SavedDisk;

/// The name of the export.
const EXPORT: &str = "disk";

/// What the server offers in the negotiation: its new form, and replies without padding.
const HANDSHAKE_FLAGS: u16 = 1 | 2;

/// An option that ends the negotiation.
const ABORT: u32 = 2;

/// The server does not know an option.
const UNSUPPORTED: u32 = OPTION_ERROR | 1;

/// A request that only the server of this module gets.
const TRIM: u16 = 4;

/// The export has flags, and takes requests to flush, trim and write zeros.
const EXPORT_FLAGS: u16 = 1 | 4 | 32 | 64;

/// The longest option and the longest request, which QEMU does not exceed.
const MAX_OPTION_BYTES: u32 = 4096;
const MAX_REQUEST_BYTES: u32 = 32 << 20;

/// Numbers of errors in the protocol.
const IO_FAILED: u32 = 5;
const INVALID: u32 = 22;

type Page = [u8; PAGE_SIZE];

/// A disk that is served to one QEMU. The server ends with its connection.
pub struct ServedDisk {
    label: String,
    root: ContentId,
    /// Where QEMU connects to.
    socket: PathBuf,
    content: Arc<Mutex<Content>>,
}

/// The content of a disk.
struct Content {
    bytes: ByteCount,
    tree: PageTree,
    store: Box<dyn Store + Send>,
    written: BTreeMap<PageNumber, Box<Page>>,
    /// Why a page could not be read.
    failure: Option<Error>,
}

impl ServedDisk {
    /// Serves a disk of a checkpoint whose content is in `store`.
    pub fn start(disk: &SavedDisk<'_>, store: impl Store + Send + 'static) -> Result<ServedDisk> {
        let failed = || Error::system("make a socket for a disk");
        let parent = std::env::temp_dir();
        // What a process that was killed has left there.
        scratch_directory::sweep(&parent);
        let directory = ScratchDirectory::new_in(&parent, Purpose::Disks).map_err(failed())?;
        let socket = directory.path().join(EXPORT);
        let listener = UnixListener::bind(&socket).map_err(failed())?;
        let tree = PageTree::load(disk.root, &store)?;
        let written = BTreeMap::new();
        let content = Content { bytes: disk.bytes, tree, store: Box::new(store), written, failure: None };
        let content = Arc::new(Mutex::new(content));
        let served = Arc::clone(&content);
        let thread = std::thread::Builder::new().name("pagemark-disk".into());
        let started = thread.spawn(move || {
            // QEMU connects once. Where it breaks the connection, it has ended.
            if let Ok((stream, _)) = listener.accept() {
                drop(listener);
                // Where this process is killed, no file stays.
                drop(directory);
                let _ = serve(&stream, &served);
            }
        });
        started.map_err(Error::system("start a thread"))?;
        Ok(ServedDisk { label: disk.image.label.clone(), root: disk.root, socket, content })
    }

    /// Has the arguments of QEMU name this disk in place of its image.
    pub fn replace_in(&self, arguments: &mut [String], old: &DiskImage) -> Result<()> {
        let address = format!("nbd:unix:{}:exportname={EXPORT}", self.socket.display());
        let mut is_named = false;
        for argument in arguments.iter_mut().filter(|argument| names_file(argument, &old.file)) {
            *argument = with_served_file(argument, &old.file, &address).ok_or_else(|| {
                let reason = "is not named by the option file= of -drive";
                Error::about(ErrorKind::Unsupported, Object::Image(old.file.clone().into()), reason)
            })?;
            is_named = true;
        }
        match is_named {
            true => Ok(()),
            false => Err(Error::damaged(format!("no argument of QEMU names the image {}", old.file))),
        }
    }

    /// The disk's name.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// The first page that is not that of a later checkpoint, whose tree has the root `later`.
    pub fn first_difference(&self, later: ContentId, store: &dyn Store) -> Result<Option<PageNumber>> {
        let content = self.content()?;
        let mut expected: BTreeMap<PageNumber, ContentId> =
            content.written.keys().map(|&page| (page, content.tree.get(page))).collect();
        PageTree::diff(store, self.root, later, &mut |page, _, id| {
            expected.insert(page, id);
            Ok(())
        })?;
        let (mut ours, mut theirs) = ([0; PAGE_SIZE], [0; PAGE_SIZE]);
        for (page, id) in expected {
            content.read_page(page, &mut ours)?;
            store.get_page(id, &mut theirs)?;
            let length = content.length_of(page);
            if ours[..length] != theirs[..length] {
                return Ok(Some(page));
            }
        }
        Ok(None)
    }

    /// True if another machine, which has begun at a later checkpoint, has the same disk.
    pub fn is_same(&self, other: &ServedDisk, store: &dyn Store) -> Result<bool> {
        let (ours, theirs) = (self.content()?, other.content()?);
        let mut pages: BTreeSet<PageNumber> = ours.written.keys().chain(theirs.written.keys()).copied().collect();
        PageTree::diff(store, self.root, other.root, &mut |page, _, _| {
            pages.insert(page);
            Ok(())
        })?;
        let (mut one, mut another) = ([0; PAGE_SIZE], [0; PAGE_SIZE]);
        for page in pages {
            ours.read_page(page, &mut one)?;
            theirs.read_page(page, &mut another)?;
            let length = ours.length_of(page);
            if one[..length] != another[..length] {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn content(&self) -> Result<MutexGuard<'_, Content>> {
        let mut content = lock(&self.content);
        match content.failure.take() {
            // The machine has got an error of its disk.
            Some(failure) => Err(failure),
            None => Ok(content),
        }
    }
}

impl Drop for ServedDisk {
    fn drop(&mut self) {
        // A server that no QEMU has connected to would wait for ever.
        let _ = UnixStream::connect(&self.socket);
    }
}

fn lock(content: &Mutex<Content>) -> MutexGuard<'_, Content> {
    content.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Content {
    fn read_page(&self, page: PageNumber, content: &mut Page) -> Result<()> {
        match self.written.get(&page) {
            Some(written) => *content = **written,
            None => self.store.get_page(self.tree.get(page), content)?,
        }
        Ok(())
    }

    /// How many bytes of a page are the disk's, which need not end with a page.
    fn length_of(&self, page: PageNumber) -> usize {
        self.bytes.saturating_sub(ByteCount::new(page.address().get())).to_usize().min(PAGE_SIZE)
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let mut content = [0; PAGE_SIZE];
        for (page, within, part) in parts(offset, buffer.len()) {
            self.read_page(page, &mut content)?;
            let length = part.len();
            buffer[part].copy_from_slice(&content[within..within + length]);
        }
        Ok(())
    }

    fn write(&mut self, offset: u64, buffer: &[u8]) -> Result<()> {
        for (page, within, part) in parts(offset, buffer.len()) {
            let length = part.len();
            let mut content = [0; PAGE_SIZE];
            if length < PAGE_SIZE {
                self.read_page(page, &mut content)?;
            }
            content[within..within + length].copy_from_slice(&buffer[part]);
            self.written.insert(page, Box::new(content));
        }
        Ok(())
    }

    fn clear(&mut self, offset: u64, length: usize) -> Result<()> {
        const ZEROS: &[u8] = &[0; 1 << 20];
        for at in (0..length).step_by(ZEROS.len()) {
            self.write(offset + at as u64, &ZEROS[..ZEROS.len().min(length - at)])?;
        }
        Ok(())
    }

    /// Does what a request asks for. Returns the number of an error, or 0. The error is kept.
    fn carry_out(&mut self, request: impl FnOnce(&mut Content) -> Result<()>) -> u32 {
        match request(self) {
            Ok(()) => 0,
            Err(error) => {
                self.failure.get_or_insert(error);
                IO_FAILED
            }
        }
    }
}

/// The pages of a part of a disk, each with where the part begins in it, and which bytes of the
/// part it has.
fn parts(offset: u64, length: usize) -> impl Iterator<Item = (PageNumber, usize, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let at = offset + done as u64;
        let within = (at % PAGE_SIZE as u64) as usize;
        let bytes = (length - done).min(PAGE_SIZE - within);
        let part = done..done + bytes;
        done += bytes;
        (bytes > 0).then_some((PageNumber::new(at / PAGE_SIZE as u64), within, part))
    })
}

/// Serves a disk to one QEMU. Requests are carried out one after the other.
fn serve(mut stream: &UnixStream, content: &Mutex<Content>) -> io::Result<()> {
    let bytes = lock(content).bytes.get();
    stream.write_all(&[&b"NBDMAGIC"[..], &OPTION_MAGIC.to_be_bytes(), &HANDSHAKE_FLAGS.to_be_bytes()].concat())?;
    u32_of(stream)?;
    loop {
        if u64_of(stream)? != OPTION_MAGIC {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let (option, length) = (u32_of(stream)?, u32_of(stream)?);
        if length > MAX_OPTION_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        io::copy(&mut stream.take(length.into()), &mut io::sink())?;
        let mut reply = |kind: u32, payload: &[u8]| {
            let numbers = [option, kind, payload.len() as u32].map(u32::to_be_bytes).concat();
            stream.write_all(&[&OPTION_REPLY_MAGIC.to_be_bytes()[..], &numbers, payload].concat())
        };
        match option {
            // There is one export, whatever its name.
            GO => {
                let payload = [&[0; 2][..], &bytes.to_be_bytes(), &EXPORT_FLAGS.to_be_bytes()].concat();
                reply(INFORMATION, &payload)?;
                reply(ACKNOWLEDGED, &[])?;
                break;
            }
            ABORT => return reply(ACKNOWLEDGED, &[]),
            _ => reply(UNSUPPORTED, &[])?,
        }
    }
    loop {
        if u32_of(stream)? != REQUEST_MAGIC {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // Behind 16 bits of flags, which say how a request is to be carried out.
        let kind = u32_of(stream)? as u16;
        let (cookie, offset, length) = (u64_of(stream)?, u64_of(stream)?, u32_of(stream)?);
        if kind == DISCONNECT {
            return Ok(());
        }
        if length > MAX_REQUEST_BYTES && kind == WRITE {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut buffer = Vec::new();
        if kind == WRITE {
            buffer.resize(length as usize, 0);
            stream.read_exact(&mut buffer)?;
        }
        let is_inside = offset.checked_add(length.into()).is_some_and(|end| end <= bytes);
        let number = match (kind, is_inside) {
            (FLUSH, _) => 0,
            (READ, true) if length <= MAX_REQUEST_BYTES => {
                buffer.resize(length as usize, 0);
                lock(content).carry_out(|content| content.read(offset, &mut buffer))
            }
            (WRITE, true) => lock(content).carry_out(|content| content.write(offset, &buffer)),
            (TRIM | WRITE_ZEROES, true) => lock(content).carry_out(|content| content.clear(offset, length as usize)),
            _ => INVALID,
        };
        let mut message = [SIMPLE_REPLY_MAGIC, number].map(u32::to_be_bytes).concat();
        message.extend(cookie.to_be_bytes());
        if kind == READ && number == 0 {
            message.extend(&buffer);
        }
        stream.write_all(&message)?;
    }
}

fn array_of<const N: usize>(mut stream: &UnixStream) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn u32_of(stream: &UnixStream) -> io::Result<u32> {
    array_of(stream).map(u32::from_be_bytes)
}

fn u64_of(stream: &UnixStream) -> io::Result<u64> {
    array_of(stream).map(u64::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use pagemark::MemoryStore;
    use proptest::prelude::*;

    use super::*;

    /// Not a whole number of pages.
    const BYTES: usize = 5 * PAGE_SIZE + 1024;

    fn content(of: u8) -> Content {
        let (mut store, mut tree) = (MemoryStore::new(), PageTree::new());
        for page in [1, 3, 5] {
            let id = store.put(pagemark::Kind::Page, &[of + page; PAGE_SIZE]).unwrap();
            tree.set(PageNumber::new(page.into()), id);
        }
        let bytes = ByteCount::new(BYTES as u64);
        Content { bytes, tree, store: Box::new(store), written: BTreeMap::new(), failure: None }
    }

    proptest! {
        /// The oracle is an array of bytes.
        #[test]
        fn a_disk_holds_what_was_written(
            requests in prop::collection::vec((any::<bool>(), 0..BYTES, 1..2 * PAGE_SIZE, any::<u8>()), 0..20)
        ) {
            let mut content = content(7);
            let mut model = vec![0; BYTES];
            for page in [1, 3] {
                model[page * PAGE_SIZE..][..PAGE_SIZE].fill(7 + page as u8);
            }
            model[5 * PAGE_SIZE..].fill(12);
            for (is_write, offset, length, value) in requests {
                let length = length.min(BYTES - offset);
                match is_write {
                    true if value == 0 => content.clear(offset as u64, length).unwrap(),
                    true => content.write(offset as u64, &vec![value; length]).unwrap(),
                    false => {}
                }
                if is_write {
                    model[offset..offset + length].fill(value);
                }
                let mut read = vec![0; length];
                content.read(offset as u64, &mut read).unwrap();
                prop_assert_eq!(&read, &model[offset..offset + length]);
            }
            let mut read = vec![0; BYTES];
            content.read(0, &mut read).unwrap();
            prop_assert_eq!(read, model);
        }

        /// QEMU may be under the control of its guest.
        #[test]
        fn a_client_that_breaks_the_protocol_is_left(mut bytes in prop::collection::vec(any::<u8>(), 0..200), valid in 0..2) {
            if valid == 1 {
                let go = [&1u32.to_be_bytes()[..], &OPTION_MAGIC.to_be_bytes(), &GO.to_be_bytes(), &[0; 4]].concat();
                bytes = [go, REQUEST_MAGIC.to_be_bytes().to_vec(), bytes].concat();
            }
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let content = Mutex::new(content(0));
            theirs.write_all(&bytes).unwrap();
            theirs.shutdown(std::net::Shutdown::Write).unwrap();
            // It does not wait for more, and does not panic.
            let _ = serve(&ours, &content);
        }
    }

    #[test]
    fn nothing_stays_of_a_server() {
        let format = crate::qemu::drive::ImageFormat::Raw;
        let image = DiskImage { label: "virtio0".into(), file: "a".into(), format, is_device: false };
        let disk =
            SavedDisk { image: &image, root: ContentId::ZERO, pages: 0, bytes: ByteCount::new(512), target: None };
        let start = || ServedDisk::start(&disk, MemoryStore::new()).unwrap();
        let gone = |directory: PathBuf| pagemark_testing::wait_until("it is removed", || !directory.exists());
        // One that QEMU has connected to, and one that it never has.
        let (used, unused) = (start(), start());
        let directories = [&used, &unused].map(|disk| disk.socket.parent().unwrap().to_owned());
        assert!(directories.iter().all(|directory| directory.exists()));
        let mut client = UnixStream::connect(&used.socket).unwrap();
        let mut greeting = [0; 8];
        client.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting, b"NBDMAGIC");
        let [of_used, of_unused] = directories;
        gone(of_used);
        drop(unused);
        gone(of_unused);
        let mut arguments = vec!["-drive".to_owned(), "file=a,format=raw,if=virtio".to_owned()];
        used.replace_in(&mut arguments, &image).unwrap();
        assert!(arguments[1].starts_with("file=nbd:unix:/"), "{arguments:?}");
        let error = used.replace_in(&mut ["-hda".to_owned(), "a".to_owned()], &image).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
    }

    #[test]
    fn a_page_that_cannot_be_read_is_an_error_of_the_machine() {
        let mut content = content(0);
        content.store = Box::new(MemoryStore::new());
        let mut buffer = [0; 9];
        assert_eq!(content.carry_out(|content| content.read(PAGE_SIZE as u64, &mut buffer)), IO_FAILED);
        assert!(content.failure.is_some());
        assert_eq!(content.carry_out(|content| content.read(0, &mut buffer)), 0);
    }
}
