/** A worker of the adapter for DynamoDB Streams that prints the event lines of `leasehold consume --events`. */

import com.amazonaws.services.dynamodbv2.streamsadapter.AmazonDynamoDBStreamsAdapterClient;
import com.amazonaws.services.dynamodbv2.streamsadapter.StreamsSchedulerFactory;
import com.amazonaws.services.dynamodbv2.streamsadapter.adapter.DynamoDBStreamsClientRecord;
import com.amazonaws.services.dynamodbv2.streamsadapter.model.DynamoDBStreamsProcessRecordsInput;
import com.amazonaws.services.dynamodbv2.streamsadapter.polling.DynamoDBStreamsPollingConfig;
import com.amazonaws.services.dynamodbv2.streamsadapter.processor.DynamoDBStreamsShardRecordProcessor;
import java.net.URI;
import java.util.concurrent.TimeUnit;
import software.amazon.awssdk.auth.credentials.AwsBasicCredentials;
import software.amazon.awssdk.auth.credentials.StaticCredentialsProvider;
import software.amazon.awssdk.awscore.client.builder.AwsClientBuilder;
import software.amazon.awssdk.regions.Region;
import software.amazon.awssdk.services.cloudwatch.CloudWatchAsyncClient;
import software.amazon.awssdk.services.dynamodb.DynamoDbAsyncClient;
import software.amazon.awssdk.services.dynamodb.streams.DynamoDbStreamsClient;
import software.amazon.kinesis.common.ConfigsBuilder;
import software.amazon.kinesis.common.InitialPositionInStream;
import software.amazon.kinesis.common.InitialPositionInStreamExtended;
import software.amazon.kinesis.coordinator.Scheduler;
import software.amazon.kinesis.lifecycle.events.InitializationInput;
import software.amazon.kinesis.lifecycle.events.LeaseLostInput;
import software.amazon.kinesis.lifecycle.events.ShardEndedInput;
import software.amazon.kinesis.lifecycle.events.ShutdownRequestedInput;
import software.amazon.kinesis.metrics.NullMetricsFactory;
import software.amazon.kinesis.processor.StreamTracker;

public final class TableWorker {
    private static String worker;

    /** Arguments: the address of the streams, DynamoDB's, the stream's ARN, lease table, worker, failover in ms. */
    public static void main(String[] words) throws Exception {
        worker = words[4];
        Scheduler scheduler = scheduler(words[0], words[1], words[2], words[3], Long.parseLong(words[5]));
        Runtime.getRuntime().addShutdownHook(new Thread(() -> {
            try {
                scheduler.startGracefulShutdown().get(5, TimeUnit.SECONDS);
            } catch (Exception late) {
                System.err.println("TableWorker: no end in good order: " + late);
            }
        }));
        scheduler.run();
    }

    private static Scheduler scheduler(String streams, String dynamodb, String arn, String table, long failoverMillis) {
        AmazonDynamoDBStreamsAdapterClient client = new AmazonDynamoDBStreamsAdapterClient(
                at(DynamoDbStreamsClient.builder(), streams), Region.EU_WEST_1);
        StreamTracker tracker = StreamsSchedulerFactory.createSingleStreamTracker(
                arn, InitialPositionInStreamExtended.newInitialPosition(InitialPositionInStream.TRIM_HORIZON));
        ConfigsBuilder settings = new ConfigsBuilder(
                tracker,
                table,
                client,
                at(DynamoDbAsyncClient.builder(), dynamodb),
                at(CloudWatchAsyncClient.builder(), dynamodb),
                worker,
                Processor::new);
        DynamoDBStreamsPollingConfig polling = new DynamoDBStreamsPollingConfig(client);
        polling.idleTimeBetweenReadsInMillis(300);
        return StreamsSchedulerFactory.createScheduler(
                settings.checkpointConfig(),
                settings.coordinatorConfig().parentShardPollIntervalMillis(500),
                settings.leaseManagementConfig().failoverTimeMillis(failoverMillis).shardSyncIntervalMillis(1000),
                settings.lifecycleConfig(),
                settings.metricsConfig().metricsFactory(new NullMetricsFactory()),
                settings.processorConfig(),
                settings.retrievalConfig().retrievalSpecificConfig(polling),
                client);
    }

    private static <B extends AwsClientBuilder<B, C>, C> C at(B builder, String endpoint) {
        return builder.endpointOverride(URI.create(endpoint))
                .region(Region.EU_WEST_1)
                .credentialsProvider(StaticCredentialsProvider.create(AwsBasicCredentials.create("demo", "demo")))
                .build();
    }

    /** A whole line at a time, with the time at which it is written. */
    private static synchronized void say(String event, String shard, String more) {
        System.out.printf("{\"t\": %d, \"worker\": \"%s\", \"event\": \"%s\", \"shard\": \"%s\"%s}%n",
                System.currentTimeMillis(), worker, event, shard, more);
        System.out.flush();
    }

    /** Says what happens to one shard, and checkpoints after every batch. */
    private static final class Processor implements DynamoDBStreamsShardRecordProcessor {
        private String shard;

        @Override
        public void initialize(InitializationInput input) {
            shard = input.shardId();
            say("initialize", shard, "");
        }

        @Override
        public void processRecords(DynamoDBStreamsProcessRecordsInput input) {
            for (DynamoDBStreamsClientRecord each : input.records()) {
                say("record", shard, String.format(
                        ", \"sequence_number\": \"%s\", \"partition_key\": \"{\\\"id\\\":{\\\"S\\\":\\\"%s\\\"}}\"",
                        each.sequenceNumber(), each.getRecord().dynamodb().keys().get("id").s()));
            }
            if (!input.records().isEmpty()) {
                attempt(() -> input.checkpointer().checkpoint());
            }
        }

        @Override
        public void leaseLost(LeaseLostInput input) {
            say("lease-lost", shard, "");
        }

        @Override
        public void shardEnded(ShardEndedInput input) {
            say("shard-ended", shard, "");
            attempt(() -> input.checkpointer().checkpoint());
        }

        @Override
        public void shutdownRequested(ShutdownRequestedInput input) {
            attempt(() -> input.checkpointer().checkpoint());
            say("stopped", shard, "");
        }

        /** A checkpoint is refused once the lease is another's: its next owner repeats the batch. */
        private void attempt(Checkpoint checkpoint) {
            try {
                checkpoint.make();
            } catch (Exception refused) {
                System.err.println("TableWorker: " + shard + ": " + refused);
            }
        }
    }

    private interface Checkpoint {
        void make() throws Exception;
    }
}
