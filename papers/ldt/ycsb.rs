//! A load like that of YCSB's core workloads: records of ten fields, keys that follow Zipf's law,
//! reads of a whole record and updates of one field.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use pagemark_report::samples::Samples;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand_distr::{Bernoulli, Distribution, Uniform, Zipf};

/// Defaults of YCSB.
const FIELDS: usize = 10;
const FIELD_BYTES: usize = 100;
const SKEW: f64 = 0.99;

/// Records that are sent before their replies are read, while the server is filled.
const PIPELINE: u32 = 64;

/// A mix of requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    pub records: u32,
    /// Share of reads, 0 to 1.
    pub reads: f64,
    /// Connections. Each sends a request when it has the reply to the one before.
    pub clients: u32,
}

/// Results of a load.
#[derive(Clone, Debug, Default)]
pub(super) struct Served {
    pub requests: u64,
    /// Latency of each update.
    pub update_us: Samples,
}

impl Load {
    /// Writes all records.
    pub fn fill(&self, port: u16) -> io::Result<()> {
        let mut client = Client::connect(port)?;
        let value = [b'a'; FIELD_BYTES];
        for first in (0..self.records).step_by(PIPELINE as usize) {
            let last = self.records.min(first + PIPELINE);
            for record in first..last {
                let (key, names) = (key(record), (0..FIELDS).map(field).collect::<Vec<_>>());
                let mut words = vec![b"HSET".as_slice(), key.as_bytes()];
                words.extend(names.iter().flat_map(|name| [name.as_bytes(), &value]));
                client.send(&words);
            }
            client.flush()?;
            (first..last).try_for_each(|_| client.reply())?;
        }
        Ok(())
    }

    /// Sends requests for `time`.
    pub fn run(&self, port: u16, time: Duration) -> io::Result<Served> {
        std::thread::scope(|scope| {
            let clients: Vec<_> =
                (0..self.clients).map(|client| scope.spawn(move || self.run_client(port, time, client))).collect();
            let mut all = Served::default();
            for client in clients {
                let served = client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
                all.requests += served.requests;
                all.update_us.extend(&served.update_us);
            }
            Ok(all)
        })
    }

    fn run_client(&self, port: u16, time: Duration, seed: u32) -> io::Result<Served> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let mut random = SmallRng::seed_from_u64(seed.into());
        let ranks = Zipf::new(f64::from(self.records), SKEW).map_err(|_| invalid())?;
        let is_read = Bernoulli::new(self.reads).map_err(|_| invalid())?;
        let fields = Uniform::new(0, FIELDS).map_err(|_| invalid())?;
        let bytes = Uniform::new(b'a', b'z').map_err(|_| invalid())?;
        let mut client = Client::connect(port)?;
        let mut served = Served::default();
        let begin = Instant::now();
        while begin.elapsed() < time {
            let key = key(record(ranks.sample(&mut random) as u32, self.records));
            if is_read.sample(&mut random) {
                client.request(&[b"HGETALL", key.as_bytes()])?;
            } else {
                let value = [bytes.sample(&mut random); FIELD_BYTES];
                let name = field(fields.sample(&mut random));
                let begin = Instant::now();
                client.request(&[b"HSET", key.as_bytes(), name.as_bytes(), &value])?;
                served.update_us.push(begin.elapsed().as_nanos() as f64 / 1e3);
            }
            served.requests += 1;
        }
        Ok(served)
    }
}

/// The record with a rank in popularity, from 1: popular records are spread over all.
fn record(rank: u32, records: u32) -> u32 {
    (hash(rank) % u64::from(records)) as u32
}

fn key(record: u32) -> String {
    format!("user{}", hash(record))
}

fn field(number: usize) -> String {
    format!("field{number}")
}

/// FNV-1a.
fn hash(number: u32) -> u64 {
    number
        .to_le_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// A connection to the server.
struct Client {
    stream: BufReader<TcpStream>,
    unsent: Vec<u8>,
    line: Vec<u8>,
}

impl Client {
    fn connect(port: u16) -> io::Result<Client> {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_nodelay(true)?;
        Ok(Client { stream: BufReader::new(stream), unsent: Vec::new(), line: Vec::new() })
    }

    fn request(&mut self, words: &[&[u8]]) -> io::Result<()> {
        self.send(words);
        self.flush()?;
        self.reply()
    }

    fn send(&mut self, words: &[&[u8]]) {
        encode(words, &mut self.unsent);
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.get_mut().write_all(&self.unsent)?;
        self.unsent.clear();
        Ok(())
    }

    fn reply(&mut self) -> io::Result<()> {
        skip_reply(&mut self.stream, &mut self.line)
    }
}

/// Adds a request in Redis' protocol.
fn encode(words: &[&[u8]], request: &mut Vec<u8>) {
    request.extend_from_slice(format!("*{}\r\n", words.len()).as_bytes());
    for word in words {
        request.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        request.extend_from_slice(word);
        request.extend_from_slice(b"\r\n");
    }
}

/// Reads one reply of any kind. An error that the server replies is returned as an error.
fn skip_reply(stream: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<()> {
    let mut replies = 1u64;
    while replies > 0 {
        replies -= 1;
        line.clear();
        stream.read_until(b'\n', line)?;
        let unexpected = || {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("the server replied {:?}", String::from_utf8_lossy(line)),
            )
        };
        let (kind, rest) = line.split_first().ok_or(io::ErrorKind::UnexpectedEof)?;
        let number = || str::from_utf8(rest).ok()?.trim_end().parse::<i64>().ok();
        match kind {
            b'+' | b':' => {}
            b'*' => replies += number().ok_or_else(unexpected)?.max(0) as u64,
            b'$' => {
                let length = number().ok_or_else(unexpected)?;
                if length >= 0 {
                    let bytes = length as u64 + 2;
                    if io::copy(&mut stream.take(bytes), &mut io::sink())? < bytes {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
            }
            _ => return Err(unexpected()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_in_the_protocol_of_redis() {
        let mut request = Vec::new();
        encode(&[b"HSET", b"user1", b""], &mut request);
        assert_eq!(request, b"*3\r\n$4\r\nHSET\r\n$5\r\nuser1\r\n$0\r\n\r\n");
    }

    #[test]
    fn one_reply_is_read_and_no_more() {
        let skip = |text: &str| {
            let mut rest = text.as_bytes();
            skip_reply(&mut rest, &mut Vec::new()).map(|()| String::from_utf8_lossy(rest).into_owned())
        };
        assert_eq!(skip(":1\r\nrest").unwrap(), "rest");
        assert_eq!(skip("+OK\r\n").unwrap(), "");
        assert_eq!(skip("*2\r\n$6\r\nfield0\r\n$3\r\na\r\n\r\nrest").unwrap(), "rest");
        assert_eq!(skip("*2\r\n*1\r\n:5\r\n$-1\r\nrest").unwrap(), "rest");
        for wrong in ["", "$5\r\nabc", "*1\r\n", "!\r\n", "$x\r\n"] {
            assert!(skip(wrong).is_err(), "{wrong:?}");
        }
        assert!(skip("-ERR no\r\n").unwrap_err().to_string().contains("ERR no"));
    }

    #[test]
    fn few_records_get_most_requests_and_are_anywhere() {
        let (records, requests) = (1000, 100_000);
        let mut random = SmallRng::seed_from_u64(5);
        let ranks = Zipf::new(f64::from(records), SKEW).unwrap();
        let mut counts = vec![0u32; records as usize];
        (0..requests).for_each(|_| counts[record(ranks.sample(&mut random) as u32, records) as usize] += 1);
        let mut sorted = counts.clone();
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        // By Zipf's law with exponent 0.99, the first of 1000 records gets 1/7.7 of the requests,
        // the first hundred two thirds.
        assert!((0.11..0.17).contains(&(f64::from(sorted[0]) / f64::from(requests))), "{}", sorted[0]);
        let share = f64::from(sorted[..100].iter().sum::<u32>()) / f64::from(requests);
        assert!((0.6..0.8).contains(&share), "{share}");
        let wanted: Vec<usize> = (0..counts.len()).filter(|&record| counts[record] >= sorted[19]).collect();
        assert!(wanted.iter().any(|&record| record < 300) && wanted.iter().any(|&record| record > 700), "{wanted:?}");
    }
}
