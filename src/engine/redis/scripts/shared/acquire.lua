-- Acquires a share of a name for one owner. The attempt of a waiter enters (or stays in) the queue. No attempt overtakes a live waiter
-- that came earlier. Before and after a grant the first waiters that fit are granted, too: leases may have ended.
--
-- KEYS    1  the set of the holders
--         2  the fence companion, which has the last token in a cluster
--         3  the queue
--         4  the last fencing token of all names (last.lua), on a single server
-- ARGV    1 to 7, and 9: those of acquire.lua
--         8  the share: <permits>/<limit>
-- Answer  that of acquire.lua. The PTTL is that of the share that ends first

local key, companion, queue = KEYS[1], KEYS[2], KEYS[3]
local owner, ttl, to, me, number = ARGV[1], tonumber(ARGV[2]), ARGV[5], ARGV[6], tonumber(ARGV[7])
local is_queued = redis.call('EXISTS', queue) == 1
local own, is_held = read(key, owner)

if not own then
  local passed = is_queued and pass(key, queue, companion, to, me, number > 0 and number)
  if passed ~= false or not is_within(string.match(ARGV[8], '(%d+)/(%d+)')) then
    if me ~= '' then
      number = enter(queue, me, number)
    end
    return passed == nil and {} or { 1, first_left(), number, 0, microseconds() }
  end
end

local last = larger(now, LAST or companion)
local fence, since = string.format('%.0f', last), string.format('%.0f', ms)
if is_held then
  -- A retry after a lost reply: the earlier grant, with at least a full ttl.
  fence, since = string.match(own, '^%S+ (%d+) %x+ (%d+)')
  ttl = math.max(ttl, redis.call('ZSCORE', key, own) - ms)
end
local metadata = ARGV[9] and '\n' .. ARGV[9] or ''
local member = string.format('%s %s %s %s %s%s', ARGV[8], fence, owner, since, ARGV[4], metadata)
write(member, ttl)
if own and own ~= member then
  redis.call('ZREM', key, own)
end
draw(string.format('%.0f', last), companion)
if is_queued and me ~= '' then
  redis.call('ZREM', queue, me)
  mark_alive(queue, me)
  read(key)
  pass(key, queue, companion, to)
end
return tonumber(fence)
