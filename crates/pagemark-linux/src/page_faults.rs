//! How many page faults there were.

/// The page faults of all threads of this process since it began, those of its system calls among
/// them. Those of other processes that access its memory are not.
pub fn of_this_process() -> u64 {
    count(libc::RUSAGE_SELF)
}

/// The page faults of this thread.
pub fn of_this_thread() -> u64 {
    count(libc::RUSAGE_THREAD)
}

fn count(whose: libc::c_int) -> u64 {
    // SAFETY: numbers, which may all be zero.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes the numbers to `usage`. The call cannot fail with these arguments.
    unsafe { libc::getrusage(whose, &raw mut usage) };
    usage.ru_minflt as u64 + usage.ru_majflt as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn the_faults_of_each_thread_count() {
        const PAGES: usize = 50;
        let before = (of_this_process(), of_this_thread());
        std::thread::spawn(|| {
            let scratch = Scratch::new(PAGES);
            (0..PAGES).for_each(|page| scratch.write(page, 1));
        })
        .join()
        .unwrap();
        // Other tests run at the same time.
        assert!(of_this_process() - before.0 >= PAGES as u64);
        assert!(of_this_thread() - before.1 < PAGES as u64);
    }
}
