//! A queue of jobs and the threads that do them.

use std::{
    collections::VecDeque,
    io,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread,
};

use crate::sample::lock;

/// Its threads end when the last handle is dropped, after the job that they are at.
#[derive(Debug)]
pub(crate) struct WorkQueue<Job: Send + 'static> {
    shared: Arc<Shared<Job>>,
}

#[derive(Debug)]
struct Shared<Job> {
    /// `None`: closed.
    jobs: Mutex<Option<VecDeque<Job>>>,
    arrived: Condvar,
}

/// What the threads of a queue are like.
pub(crate) struct Threads {
    pub(crate) name: &'static str,
    pub(crate) count: usize,
    pub(crate) stack_bytes: usize,
    /// Added to their niceness: what they do is not urgent.
    pub(crate) niceness: i32,
}

impl<Job: Send + 'static> WorkQueue<Job> {
    /// Start the threads.
    ///
    /// # Errors
    /// The system starts no further thread.
    pub(crate) fn start(threads: &Threads, work: impl Fn(Job) + Send + Sync + 'static) -> io::Result<Self> {
        let shared = Arc::new(Shared { jobs: Mutex::new(Some(VecDeque::new())), arrived: Condvar::new() });
        let queue = Self { shared };
        let work = Arc::new(work);
        for _ in 0..threads.count {
            let (shared, work, niceness) = (queue.shared.clone(), work.clone(), threads.niceness);
            let builder =
                thread::Builder::new().name(threads.name.to_owned()).stack_size(threads.stack_bytes);
            builder.spawn(move || {
                if niceness > 0 {
                    let _ = rustix::process::nice(niceness); // it is a favour to others, not a need
                }
                while let Some(job) = shared.next() {
                    work(job);
                }
            })?;
        }
        Ok(queue)
    }

    /// Put a job at the end, unless `limit` wait already.
    pub(crate) fn push(&self, job: Job, limit: usize) -> Result<(), Job> {
        self.shared.push(job, limit)
    }

    /// What puts jobs there from elsewhere.
    pub(crate) fn sender(&self) -> JobSender<Job> {
        JobSender(self.shared.clone())
    }
}

/// Puts jobs into a queue as long as it is there.
#[derive(Debug)]
pub(crate) struct JobSender<Job>(Arc<Shared<Job>>);

impl<Job> JobSender<Job> {
    /// As of the queue; one that is closed takes none.
    pub(crate) fn push(&self, job: Job, limit: usize) -> Result<(), Job> {
        self.0.push(job, limit)
    }
}

impl<Job> Shared<Job> {
    fn push(&self, job: Job, limit: usize) -> Result<(), Job> {
        let mut jobs = lock(&self.jobs);
        match &mut *jobs {
            Some(jobs) if jobs.len() < limit => jobs.push_back(job),
            _ => return Err(job),
        }
        drop(jobs);
        self.arrived.notify_one();
        Ok(())
    }

    fn next(&self) -> Option<Job> {
        let mut jobs = lock(&self.jobs);
        loop {
            if let Some(job) = jobs.as_mut()?.pop_front() {
                return Some(job);
            }
            jobs = self.arrived.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<Job: Send + 'static> Drop for WorkQueue<Job> {
    fn drop(&mut self) {
        *lock(&self.shared.jobs) = None;
        self.shared.arrived.notify_all();
    }
}
