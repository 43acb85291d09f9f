//! Found by a hostile review of issue 11. Fails on the code that was reviewed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mongodb::Client;
use mongodb::options::{ClientOptions, CollectionOptions, ServerAddress};

use super::super::pool::{Class, Place, Pool};
use super::super::sight::Sight;

/// Waiters that try again together (after a heartbeat failed, or the collection was dropped) are of the class of renewals.
#[tokio::test]
async fn a_renewal_does_not_wait_behind_the_attempts_of_waiters() {
    let options = ClientOptions::builder()
        .hosts(vec![ServerAddress::parse("127.0.0.1:1").unwrap()])
        .build();
    let client = Client::with_options(options.clone()).unwrap();
    let place = Place {
        database: "d".into(),
        collection: "c".into(),
        options: CollectionOptions::default(),
    };
    let sight = Sight::new(&options);
    let pool = Pool::new(client, options, place, sight, 8, Duration::from_secs(5));
    // Each command takes 5 ms. `Core::class` of a claim with a place in a queue is `Keep`.
    for _ in 0..2000 {
        let pool = pool.clone();
        tokio::spawn(async move {
            let _permit = pool.permit(Class::Keep).await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        });
    }
    tokio::time::sleep(Duration::from_millis(20)).await;
    let asked = Instant::now();
    // A renewal, and a release.
    drop(Arc::clone(&pool).permit(Class::Keep).await);
    let renewal = asked.elapsed();
    assert!(renewal < Duration::from_millis(250), "the renewal waited for {renewal:?}");
}
