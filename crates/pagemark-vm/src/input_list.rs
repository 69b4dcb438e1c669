//! What came to a machine from outside while it was recorded, and when.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use crate::command_line::{CONSOLE_OUTPUT, INPUTS, option_name, split_options};
use crate::error::{Error, ErrorKind, Object, Result};
use crate::simulator::{completes_requests, option_word, shared_file, simulator_library};

/// The character devices of a console whose input is recorded.
const CONSOLES: [&str; 1] = ["stdio"];

/// The list of what comes to a machine from outside, which Pagemark's plugin writes in QEMU. It is
/// in memory, and part of each checkpoint.
#[derive(Debug)]
pub struct InputList {
    file: File,
    path: PathBuf,
}

impl InputList {
    /// An empty list.
    ///
    /// # Errors
    /// [`ErrorKind::System`]
    pub fn new() -> Result<InputList> {
        let (file, path) = shared_file()?;
        Ok(InputList { file, path })
    }

    /// A list that a machine gets when it runs again.
    pub(crate) fn of(bytes: &[u8]) -> Result<InputList> {
        let list = InputList::new()?;
        list.file.write_all_at(bytes, 0).map_err(Error::system("keep the inputs of the machine"))?;
        Ok(list)
    }

    /// What is in it.
    pub(crate) fn read(&self) -> Result<Vec<u8>> {
        let failed = || Error::system("read the inputs of the machine");
        let mut bytes = vec![0; self.file.metadata().map_err(failed())?.len() as usize];
        self.file.read_exact_at(&mut bytes, 0).map_err(failed())?;
        Ok(bytes)
    }

    /// The option of the plugin that names it.
    pub(crate) fn option(&self) -> Result<String> {
        Ok(format!("{INPUTS}{}", option_word(&self.path)?))
    }
}

/// The command line of a machine that repeats its run
/// ([`deterministic_command`](crate::deterministic_command)), with a console whose input is
/// recorded: that of `-serial stdio`. Pagemark's plugin reads QEMU's standard input, and writes to
/// the list what the machine gets of it, and when. None if the machine has no such console.
///
/// # Errors
/// [`ErrorKind::NotFound`] says where the plugin was looked for.
///
/// ```
/// use std::ffi::OsString;
///
/// let command = ["qemu-system-x86_64", "-serial", "file:serial"].map(OsString::from);
/// assert!(pagemark_vm::deterministic_console(&command)?.is_none());
/// # Ok::<(), pagemark_vm::Error>(())
/// ```
pub fn deterministic_console(command: &[OsString]) -> Result<Option<(Vec<OsString>, InputList)>> {
    let word = |at: usize| command.get(at).and_then(|word| word.to_str()).unwrap_or_default();
    let is_option = |at: usize, name: &str| option_name(word(at)) == Some(name);
    let is_console = |at: &usize| is_option(*at - 1, "serial") && CONSOLES.contains(&word(*at));
    let Some(console) = (2..command.len()).find(is_console) else { return Ok(None) };
    let list = InputList::new()?;
    let mut command = command.to_vec();
    let text = |at: usize| command[at].to_str().unwrap_or_default().to_owned();
    let is_plugin = |at: &usize| option_name(&text(*at - 1)) == Some("plugin") && completes_requests(&[text(*at)]);
    match (2..command.len()).find(is_plugin) {
        Some(at) => command[at] = format!("{},{}", text(at), list.option()?).into(),
        None => {
            let plugin = format!("{},{}", option_word(&simulator_library()?)?, list.option()?);
            command.extend(["-plugin".into(), plugin.into()]);
        }
    }
    let id = split_options(CONSOLE_OUTPUT).iter().find_map(|option| option.strip_prefix("id="));
    let id = id.ok_or_else(|| Error::about(ErrorKind::Damaged, Object::None, "the console has no name"))?;
    command[console] = format!("chardev:{id}").into();
    command.extend(["-chardev".into(), CONSOLE_OUTPUT.into()]);
    Ok(Some((command, list)))
}
