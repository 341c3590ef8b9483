//! Reads the shards of `canned` one after the other, without leases, on one thread: loop URL

use aws_sdk_kinesis::config::{Builder, Credentials, Region};
use aws_sdk_kinesis::types::ShardIteratorType;
use aws_sdk_kinesis::{Client, Error};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Error> {
    let config = Builder::new()
        .endpoint_url(std::env::args().nth(1).expect("the server's address"))
        .region(Region::new("eu-west-1"))
        .credentials_provider(Credentials::new("demo", "demo", None, None, "demo"))
        .http_client(aws_smithy_http_client::Builder::new().build_http())
        .behavior_version_latest()
        .build();
    let client = Client::from_conf(config);
    let mut places = Vec::new();
    for shard in client.list_shards().stream_name("canned").send().await?.shards() {
        let asked = client.get_shard_iterator().stream_name("canned").shard_id(shard.shard_id());
        let told = asked.shard_iterator_type(ShardIteratorType::TrimHorizon).send().await?;
        places.push(told.shard_iterator.expect("an iterator"));
    }
    let mut bytes = 0;
    loop {
        for place in &places {
            let told = client.get_records().shard_iterator(place).send().await?;
            bytes += told.records().iter().map(|each| each.data().as_ref().len()).sum::<usize>();
        }
        std::hint::black_box(bytes);
    }
}
