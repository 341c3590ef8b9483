/**
 * One Java KCL worker that prints the event lines of `leasehold consume --events`, for any KCL 2.x or 3.x.
 * With -Dcount=true it says nothing of records and checkpoints once a second: what it costs is then KCL's.
 */

import java.lang.reflect.Method;
import java.net.URI;
import java.security.MessageDigest;
import java.util.HexFormat;
import java.util.concurrent.TimeUnit;
import software.amazon.awssdk.auth.credentials.AwsBasicCredentials;
import software.amazon.awssdk.auth.credentials.StaticCredentialsProvider;
import software.amazon.awssdk.awscore.client.builder.AwsAsyncClientBuilder;
import software.amazon.awssdk.awscore.client.builder.AwsClientBuilder;
import software.amazon.awssdk.http.Protocol;
import software.amazon.awssdk.http.nio.netty.NettyNioAsyncHttpClient;
import software.amazon.awssdk.regions.Region;
import software.amazon.awssdk.services.cloudwatch.CloudWatchAsyncClient;
import software.amazon.awssdk.services.dynamodb.DynamoDbAsyncClient;
import software.amazon.awssdk.services.kinesis.KinesisAsyncClient;
import software.amazon.kinesis.common.ConfigsBuilder;
import software.amazon.kinesis.common.InitialPositionInStream;
import software.amazon.kinesis.common.InitialPositionInStreamExtended;
import software.amazon.kinesis.common.StreamIdentifier;
import software.amazon.kinesis.coordinator.CoordinatorConfig;
import software.amazon.kinesis.coordinator.Scheduler;
import software.amazon.kinesis.lifecycle.events.InitializationInput;
import software.amazon.kinesis.lifecycle.events.LeaseLostInput;
import software.amazon.kinesis.lifecycle.events.ProcessRecordsInput;
import software.amazon.kinesis.lifecycle.events.ShardEndedInput;
import software.amazon.kinesis.lifecycle.events.ShutdownRequestedInput;
import software.amazon.kinesis.metrics.NullMetricsFactory;
import software.amazon.kinesis.processor.ShardRecordProcessor;
import software.amazon.kinesis.processor.SingleStreamTracker;
import software.amazon.kinesis.retrieval.KinesisClientRecord;
import software.amazon.kinesis.retrieval.polling.PollingConfig;

public final class KclWorker {
    private static String worker;
    /** After so many records, checkpoint just there and wait to be killed: a batch half done. */
    private static final long HOLD_AFTER = Long.getLong("hold.after", Long.MAX_VALUE);

    private static final boolean COUNT = Boolean.getBoolean("count");

    /** Arguments: Kinesis' address, DynamoDB's, stream, table, worker, failover in ms, and "2x" for compatible mode. */
    public static void main(String[] words) throws Exception {
        worker = words[4];
        Scheduler scheduler = scheduler(words[0], words[1], words[2], words[3], Long.parseLong(words[5]), words[6]);
        Runtime.getRuntime().addShutdownHook(new Thread(() -> {
            try {
                scheduler.startGracefulShutdown().get(5, TimeUnit.SECONDS);
            } catch (Exception late) {
                System.err.println("KclWorker: no end in good order: " + late);
            }
        }));
        scheduler.run();
    }

    private static Scheduler scheduler(
            String kinesis, String dynamodb, String stream, String table, long failoverMillis, String mode)
            throws Exception {
        KinesisAsyncClient streams = at(KinesisAsyncClient.builder(), kinesis);
        SingleStreamTracker tracker = new SingleStreamTracker(
                StreamIdentifier.singleStreamInstance(stream),
                InitialPositionInStreamExtended.newInitialPosition(InitialPositionInStream.TRIM_HORIZON));
        ConfigsBuilder settings = new ConfigsBuilder(
                tracker,
                table,
                streams,
                at(DynamoDbAsyncClient.builder(), dynamodb),
                at(CloudWatchAsyncClient.builder(), dynamodb),
                worker,
                Processor::new);
        PollingConfig polling = new PollingConfig(stream, streams);
        polling.idleTimeBetweenReadsInMillis(Long.getLong("idle.millis", 200));
        // A service on a busy machine may need longer for a large answer than a client waits.
        polling.maxRecords(Integer.getInteger("max.records", 10_000));
        return new Scheduler(
                settings.checkpointConfig(),
                inMode(mode, settings.coordinatorConfig().parentShardPollIntervalMillis(500)),
                settings.leaseManagementConfig().failoverTimeMillis(failoverMillis).shardSyncIntervalMillis(1000),
                settings.lifecycleConfig(),
                settings.metricsConfig().metricsFactory(new NullMetricsFactory()),
                settings.processorConfig(),
                settings.retrievalConfig().retrievalSpecificConfig(polling));
    }

    /** KCL 2.x knows no modes: what names them is looked for only when asked for. */
    @SuppressWarnings({"unchecked", "rawtypes"})
    private static CoordinatorConfig inMode(String mode, CoordinatorConfig config) throws Exception {
        if (mode.equals("2x")) {
            for (Method setter : CoordinatorConfig.class.getMethods()) {
                if (setter.getName().equals("clientVersionConfig") && setter.getParameterCount() == 1) {
                    Class versions = setter.getParameterTypes()[0];
                    setter.invoke(config, Enum.valueOf(versions, "CLIENT_VERSION_CONFIG_COMPATIBLE_WITH_2X"));
                }
            }
        }
        return config;
    }

    private static <B extends AwsClientBuilder<B, C> & AwsAsyncClientBuilder<B, C>, C> C at(B builder, String endpoint) {
        NettyNioAsyncHttpClient.Builder http = NettyNioAsyncHttpClient.builder().protocol(Protocol.HTTP1_1);
        return builder.endpointOverride(URI.create(endpoint))
                .region(Region.EU_WEST_1)
                .credentialsProvider(StaticCredentialsProvider.create(AwsBasicCredentials.create("demo", "demo")))
                .httpClientBuilder(http)
                .build();
    }

    /** A whole line at a time, with the time at which it is written. */
    private static synchronized void say(String event, String shard, String more) {
        System.out.printf("{\"t\": %d, \"worker\": \"%s\", \"event\": \"%s\", \"shard\": \"%s\"%s}%n",
                System.currentTimeMillis(), worker, event, shard, more);
        System.out.flush();
    }

    /** Says what happens to one shard, and checkpoints after every batch. */
    private static final class Processor implements ShardRecordProcessor {
        private String shard;
        private boolean over;
        private long handled;
        private long bytes;
        private long stored;

        @Override
        public void initialize(InitializationInput input) {
            shard = input.shardId();
            say("initialize", shard, "");
        }

        @Override
        public void processRecords(ProcessRecordsInput input) {
            if (COUNT) {
                count(input);
                return;
            }
            for (KinesisClientRecord each : input.records()) {
                say("record", shard, told(each));
                handled++;
                if (handled == HOLD_AFTER) {
                    attempt(() -> input.checkpointer().checkpoint(each.sequenceNumber(), each.subSequenceNumber()));
                    attempt(() -> Thread.sleep(Long.MAX_VALUE));
                }
            }
            if (!input.records().isEmpty()) {
                attempt(() -> input.checkpointer().checkpoint());
            }
        }

        private void count(ProcessRecordsInput input) {
            for (KinesisClientRecord each : input.records()) {
                bytes += each.data().remaining();
            }
            if (System.nanoTime() - stored > TimeUnit.SECONDS.toNanos(1)) {
                attempt(() -> input.checkpointer().checkpoint());
                stored = System.nanoTime();
            }
        }

        @Override
        public void leaseLost(LeaseLostInput input) {
            end("lease-lost");
        }

        @Override
        public void shardEnded(ShardEndedInput input) {
            end("shard-ended");
            attempt(() -> input.checkpointer().checkpoint());
        }

        @Override
        public void shutdownRequested(ShutdownRequestedInput input) {
            attempt(() -> input.checkpointer().checkpoint());
            end("stopped");
        }

        private void end(String event) {
            if (!over) {
                say(event, shard, "");
            }
            over = true;
        }

        private static String told(KinesisClientRecord each) {
            return String.format(
                    ", \"sequence_number\": \"%s\", \"sub_sequence_number\": %d, \"partition_key\": \"%s\", \"sha1\": \"%s\"",
                    each.sequenceNumber(), each.subSequenceNumber(), each.partitionKey(), sha1(each));
        }

        private static String sha1(KinesisClientRecord each) {
            try {
                MessageDigest digest = MessageDigest.getInstance("SHA-1");
                digest.update(each.data().duplicate());
                return HexFormat.of().formatHex(digest.digest());
            } catch (java.security.NoSuchAlgorithmException impossible) {
                throw new IllegalStateException(impossible);
            }
        }

        /** A checkpoint is refused once the lease is another's: its next owner repeats the batch. */
        private void attempt(Checkpoint checkpoint) {
            try {
                checkpoint.make();
            } catch (Exception refused) {
                System.err.println("KclWorker: " + shard + ": " + refused);
            }
        }
    }

    private interface Checkpoint {
        void make() throws Exception;
    }
}
