-- One node's vote for a claim: acquires every name for one attempt of an owner, or none of them.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their fence companions
--         2n+1 .. 3n     their counters (names may share one)
--         3n+1 .. 4n     their metadata companions, only when there is metadata
-- ARGV    1  the owner token
--         2  the number of the attempt: later ones have larger numbers
--         3  the ttl in ms
--         4  the ttl of a fence companion in ms: longer than the lease
--         5  the floor of the fencing token: the client's estimate of the nodes' clocks, in µs
--         6  the process id
--         7  the host
--         8  the metadata, only for a claim with metadata
-- Answer  granted: { 1, the fencing token that this node proposes, TIME in µs, 1 if the owner had the vote already, else 0 }
--         busy:    { 0, the index of the first busy key, its PTTL, its value, for how many ms it has been held or -1 }
--
-- All reads (which fail for a key of another type) come before the first write.

local owner, attempt, ttl, metadata = ARGV[1], ARGV[2], ARGV[3], ARGV[8]
local n = #KEYS / (metadata and 4 or 3)

-- Microseconds since 1970 stay below 2^53, and so exact in Lua's doubles, until the year 2255.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local ours, last, held = 0, 0, nil
for i = 1, n do
  local holder = redis.call('GET', KEYS[i])
  if holder then
    local token, number = string.match(holder, '^(%x+)%.(%d+)$')
    -- A request that a later attempt has overtaken must not replace the vote of that attempt.
    if token ~= owner or tonumber(number) > tonumber(attempt) then
      local record = redis.call('GET', KEYS[n + i])
      local since = record and token and string.match(record, '^%d+ ' .. token .. ' (%d+) ')
      -- A vote by plain commands has no record yet. The number of an attempt is the time in µs.
      since = since or number and math.floor(tonumber(number) / 1000)
      local age = since and math.max(0, math.floor(now / 1000) - since) or -1
      return { 0, i, redis.call('PTTL', KEYS[i]), holder, age }
    end
    ours = ours + 1
    held = held or number
  end
  local count = redis.call('ZSCORE', KEYS[n + n + i], 'last')
  if count and tonumber(count) > last then
    last = tonumber(count)
  end
end

local fence, record, already
if ours == n then
  -- An earlier attempt of the same owner has the vote, and its answer may have been lost: the vote stays as it was. The record
  -- belongs to that vote if it names its attempt: plain commands acquire a name and leave an older record.
  local number, token, since, pid, recorded, host = string.match(
    redis.call('GET', KEYS[n + 1]) or '', '^(%d+) (%x+) (%d+) (%d+):(%d+) (.*)$')
  if token == owner and recorded == held and held ~= attempt then
    fence, already = tonumber(number), 1
    record = string.format('%s %s %s %s:%s %s', number, owner, since, pid, attempt, host)
  end
end
local counted
if not record then
  -- With a common floor the nodes usually propose the same token. A floor that differs from this node's clock comes with a late
  -- request, or from a client with a wrong estimate: then this clock counts.
  fence = tonumber(ARGV[5])
  if math.abs(fence - now) > 100000 then
    fence = now
  end
  local since = math.floor(fence / 1000)
  if last >= fence then
    fence = last + 1
  end
  counted = string.format('%.0f', fence)
  record = string.format('%s %s %.0f %s:%s %s', counted, owner, since, ARGV[6], attempt, ARGV[7])
end

local kept = tonumber(ARGV[4]) - tonumber(ttl)
for i = 1, n do
  -- An attempt that is executed late does not shorten a lease that lasts longer by now.
  local lasts = ours > 0 and math.max(tonumber(ttl), redis.call('PTTL', KEYS[i])) or tonumber(ttl)
  redis.call('SET', KEYS[i], owner .. '.' .. attempt, 'PX', string.format('%.0f', lasts))
  redis.call('SET', KEYS[n + i], record, 'PX', string.format('%.0f', kept + lasts))
  if counted then
    redis.call('ZADD', KEYS[n + n + i], 'GT', counted, 'last')
  end
  if metadata then
    redis.call('SET', KEYS[3 * n + i], owner .. ' ' .. metadata, 'PX', string.format('%.0f', lasts))
  end
end
return { 1, fence, now, already or 0 }
