import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.RetryOneTime;

/** Holds and waits for locks of Curator: reads `acquire PATH MS` and `release PATH`, and prints the results. */
public class CuratorLock {
    public static void main(String[] args) throws Exception {
        CuratorFramework client = CuratorFrameworkFactory.newClient(args[0], new RetryOneTime(100));
        client.start();
        client.blockUntilConnected();
        Map<String, InterProcessMutex> locks = new HashMap<>();
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
        System.out.println("ready");
        for (String line; (line = input.readLine()) != null; ) {
            String[] words = line.split(" ");
            InterProcessMutex lock = locks.computeIfAbsent(words[1], path -> new InterProcessMutex(client, path));
            if (words[0].equals("acquire")) {
                System.out.println(lock.acquire(Long.parseLong(words[2]), TimeUnit.MILLISECONDS) ? "acquired" : "busy");
            } else {
                lock.release();
                System.out.println("released");
            }
        }
        client.close();
    }
}
