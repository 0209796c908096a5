-- The arithmetic of rules.py, for the scripts beside this file (each is sent with this text before it).
-- All numbers are integers below 2^53, which doubles hold exactly.
--
-- One hash holds a tenant's counters by identity, as space-separated integers:
--   window       start_us end_us used held worst_open      (end_us 0: never)
--   bucket       level at_ms held                          (level in units * scale)
--   concurrency  held
-- An ended window stays, as `identity@start_us`, while something is held or promised on it.
-- One hash holds the tenant's holds by request id (MessagePack), one sorted set their lease ends.
-- A hold is {limits = as text, ahead = by meter, on = one part for each limit}; a part is what its limit says
-- (name, shape, mode, meter, amount, scale, rate, lowest, home, ceiling, model), the start of its window, and rules.LimitHold.
-- Its home is 'p' (the counter is in the platform's hash: KEYS[6], in a Redis Cluster KEYS[1]), or an end user's id, or empty.
-- One hash holds a record of each end user with counters (MessagePack): {holds = how many requests hold on them,
-- rest = when they are at rest once none does, names = of the counters}; one sorted set those without holds, by
-- their rest.

local EPOCH, ATTEMPT, FORGOTTEN = '#epoch', '#attempt', '#forgotten'
local HELD = {w = 4, b = 3, c = 1}
local SOFT, HARD, SHADOW = 0, 1, 2

local function parse(raw)
  if not raw then
    return nil
  end
  local numbers = {}
  for number in string.gmatch(raw, '-?%d+') do
    numbers[#numbers + 1] = tonumber(number)
  end
  return numbers
end

local keys = {
  counters = KEYS[1], leases = KEYS[2], holds = KEYS[3], users = KEYS[4], resting = KEYS[5], platform = KEYS[6],
}
local now_us = clock_us(ARGV[1])

-- The hash of a counter.
local function hash_of(home)
  return home == 'p' and keys.platform or keys.counters
end

local function load(home, name)
  return parse(redis.call('HGET', hash_of(home), name))
end

local function counter_text(counter)
  local parts = {}
  for i = 1, #counter do
    parts[i] = text(counter[i])
  end
  return table.concat(parts, ' ')
end

local function store(home, name, counter)
  redis.call('HSET', hash_of(home), name, counter_text(counter))
end

-- Exact, where a rounded division might not be. (Towards zero.)
local function quotient(dividend, divisor)
  return (dividend - math.fmod(dividend, divisor)) / divisor
end

-- What the caller knows of spare capacity (spare.as_text), empty: nothing; decoded where a bucket has a ceiling.
local told, decoded = '', nil

-- rules.effective, spare.Spare.of: what a bucket goes by, the earliest first. Holds of earlier versions have no ceiling.
local function history_of(limit)
  if told == '' or not limit.ceiling or limit.ceiling <= limit.rate then
    return {}
  end
  decoded = decoded or cjson.decode(told)
  return decoded[limit.model] or {}
end

-- rules._flow
local function flow(cap, level, rate, for_ms)
  if for_ms > quotient(cap - level, rate) then
    return cap
  end
  return level + rate * math.max(0, for_ms)
end

-- rules._refill
local function refill(limit, level, from_ms, to_ms)
  local cap, in_force = limit.amount * limit.scale, limit.rate
  if level > cap then
    level = cap
  end
  for _, change in ipairs(history_of(limit)) do
    local until_ms = math.min(to_ms, math.floor(now_us / 1000) - change[1])
    level = flow(cap, level, in_force, until_ms - from_ms)
    from_ms = math.max(from_ms, until_ms)
    in_force = limit.rate + quotient((limit.ceiling - limit.rate) * change[2], 1000)
  end
  return flow(cap, level, in_force, to_ms - from_ms)
end

-- rules.advance for buckets.
local function advance_bucket(limit, counter, now_us)
  local now_ms = math.floor(now_us / 1000)
  if not counter then
    return {limit.amount * limit.scale, now_ms, 0}
  end
  local at_ms = counter[2]
  return {refill(limit, counter[1], at_ms, now_ms), math.max(now_ms, at_ms), counter[3]}
end

-- rules.room
local function room(limit, counter)
  local free
  if limit.shape == 'w' then
    free = limit.amount - counter[3] - counter[4] - counter[5]
  elseif limit.shape == 'b' then
    free = quotient(counter[1], limit.scale) - counter[3]
  else
    free = limit.amount - counter[1]
  end
  return math.max(0, free)
end

-- rules.LimitHold.covered, rules.LimitHold.open
local function covered(part)
  return part.held + part.charged
end

local function open(part)
  return math.max(0, part.most - covered(part))
end

-- rules.changed: the part becomes what is given, and the counter with it.
local function change(counter, part, held, charged, most)
  local open_before = open(part)
  counter[HELD[part.shape]] = counter[HELD[part.shape]] + held - part.held
  part.held, part.charged, part.most = held, charged, most
  if part.shape == 'w' then
    counter[5] = counter[5] + open(part) - open_before
  end
end

-- rules.is_short
local function is_short(counter, part, first, most)
  local lacking = math.max(0, math.max(first, most) - covered(part) - open(part))
  return lacking > (counter and room(part, counter) or 0)
end

-- rules.reach
local function reach(counter, part, ahead, most)
  local upto = ahead
  if part.mode == HARD then
    upto = math.min(upto, covered(part) + room(part, counter) + open(part))
  end
  change(counter, part, math.max(part.held, upto - part.charged), part.charged, math.max(part.most, most))
end

-- rules.charge
local function charge(counter, part, amount)
  if part.shape == 'w' then
    counter[3] = counter[3] + amount
  elseif part.shape == 'b' then
    counter[1] = math.max(part.lowest, counter[1] - amount * part.scale)
  end
end

-- rules.use
local function use(counter, part, used)
  if part.shape == 'b' then
    local flowed = math.max(0, used - part.charged)
    change(counter, part, math.max(0, part.held - flowed), part.charged + flowed, part.most)
    charge(counter, part, flowed)
  elseif part.shape == 'w' then
    change(counter, part, math.max(part.held, used), part.charged, part.most)
  end
end

-- rules.check_covered: the answer that raises Overrun; nil: all is covered.
local function overrun(hold, used)
  for _, part in ipairs(hold.on) do
    if part.exact and used[part.meter] > covered(part) then
      return {'overrun', part.name, covered(part), used[part.meter]}
    end
  end
end

-- The counter that a part was taken from (nil: dropped), advanced, and the name it is stored under.
local function locate(part)
  local counter = load(part.home, part.name)
  if part.shape == 'w' and (not counter or counter[1] ~= part.start) then
    local name = part.name .. '@' .. text(part.start)
    return load(part.home, name), name
  elseif part.shape == 'b' then
    return advance_bucket(part, counter, now_us), part.name
  end
  return counter, part.name
end

local function store_located(part, name, counter)
  if name ~= part.name and counter[4] == 0 and counter[5] == 0 then
    redis.call('HDEL', hash_of(part.home), name)
  else
    store(part.home, name, counter)
  end
end

-- Keeps an ended window before a new one replaces it.
local function keep_window(home, name, over)
  if over[4] > 0 or over[5] > 0 then
    store(home, name .. '@' .. text(over[1]), over)
  end
end

-- Seven numbers, one for each meter, from ARGV[from] on.
local METERS = 7
local function by_meter(from)
  local numbers = {}
  for i = 1, METERS do
    numbers[i] = tonumber(ARGV[from + i - 1])
  end
  return numbers
end

-- An empty part, from the 17 arguments of one limit (listed in wire.py).
local COLUMNS = 17
local function read_part(i)
  return {
    name = ARGV[i], shape = ARGV[i + 1], mode = tonumber(ARGV[i + 2]), meter = tonumber(ARGV[i + 3]),
    exact = ARGV[i + 4] == '1', amount = tonumber(ARGV[i + 8]), scale = tonumber(ARGV[i + 11]),
    rate = tonumber(ARGV[i + 12]), lowest = tonumber(ARGV[i + 13]), home = ARGV[i + 14],
    ceiling = tonumber(ARGV[i + 15]), model = ARGV[i + 16],
    start = 0, held = 0, charged = 0, most = 0,
  }
end

local function find_hold(request_id)
  local packed = redis.call('HGET', keys.holds, request_id)
  return packed and cmsgpack.unpack(packed)
end

local function store_hold(request_id, hold)
  redis.call('HSET', keys.holds, request_id, cmsgpack.pack(hold))
end

-- rules.rest_us
local NEVER = 9000000000000000
local function rest_us(shape, counter, cap, rate)
  if shape == 'w' then
    if counter[3] == 0 then
      return 0
    end
    return counter[2] > 0 and counter[2] or NEVER
  elseif shape == 'b' and counter[1] < cap then
    return (counter[2] + quotient(cap - counter[1] + rate - 1, rate)) * 1000
  end
  return 0
end

-- The counter on which a new part will hold, in the present window, its text, and the ended window that it replaces.
-- Nil: the caller's bounds are not those of the present window.
local function present(part, start_us, end_us)
  local raw = redis.call('HGET', hash_of(part.home), part.name)
  local counter, over = parse(raw), nil
  if part.shape == 'w' then
    if not counter or (counter[2] > 0 and now_us >= counter[2]) then
      -- A new window. The caller computes its bounds; its clock must agree with the server's on which one it is.
      if end_us > 0 and (now_us < start_us or now_us >= end_us) then
        return nil
      end
      counter, over = {start_us, end_us, 0, 0, 0}, counter
    end
    part.start = counter[1]
  elseif part.shape == 'b' then
    counter = advance_bucket(part, counter, now_us)
  elseif not counter then
    counter = {0}
  end
  return counter, raw or '', over
end

-- An end user without counters takes the place of the one that rests longest, once the most have theirs: which one
-- gives way (nil: there is room), and the refusal where none rests.
local function place_for(user, most)
  if user == '' or redis.call('HEXISTS', keys.users, user) == 1 then
    return nil, nil
  end
  local forgotten_us = tonumber(redis.call('HGET', keys.counters, FORGOTTEN) or '0')
  if now_us < forgotten_us then
    return nil, {'users', now_us, forgotten_us}
  elseif redis.call('HLEN', keys.users) >= most then
    local first = redis.call('ZRANGE', keys.resting, 0, 0, 'WITHSCORES')
    if not first[1] or tonumber(first[2]) > now_us then
      return nil, {'users', now_us, first[2] and tonumber(first[2]) or -1}
    end
    return first[1], nil
  end
  return nil, nil
end

-- The record of an end user; a new one where there is none.
local function find_user(user)
  local packed = redis.call('HGET', keys.users, user)
  if packed then
    return cmsgpack.unpack(packed), true
  end
  return {holds = 0, rest = 0, names = {}}, false
end

local function store_user(user, record)
  redis.call('HSET', keys.users, user, cmsgpack.pack(record))
  if record.holds > 0 then
    redis.call('ZREM', keys.resting, user)
  else
    redis.call('ZADD', keys.resting, text(record.rest), user)
  end
end

-- Notes a counter of an end user, and when it is at rest.
local function note_counter(record, name, rest)
  record.rest = math.max(record.rest, rest)
  for _, known in ipairs(record.names) do
    if known == name then
      return
    end
  end
  record.names[#record.names + 1] = name
end

-- Drops an end user's counters, which are at rest, and notes since when, for a clock that steps back.
local function forget_user(user)
  local record = find_user(user)
  local forgotten_us = tonumber(redis.call('HGET', keys.counters, FORGOTTEN) or '0')
  redis.call('HSET', keys.counters, FORGOTTEN, text(math.max(forgotten_us, record.rest)))
  redis.call('HDEL', keys.counters, unpack(record.names))
  redis.call('HDEL', keys.users, user)
  redis.call('ZREM', keys.resting, user)
end

-- The end user on whose counters a hold is; nil: none.
local function user_of(hold)
  for _, part in ipairs(hold.on) do
    if part.home ~= '' and part.home ~= 'p' then
      return part.home
    end
  end
end

-- One more request holds on the counters of its end user.
local function hold_on_user(hold)
  local user = user_of(hold)
  if user then
    local record = find_user(user)
    record.holds = record.holds + 1
    for _, part in ipairs(hold.on) do
      if part.home == user then
        note_counter(record, part.name, 0)
      end
    end
    store_user(user, record)
  end
end

-- Ends a hold: rules.settle on every counter it was taken from.
local function finish(request_id, hold, actual)
  local user = user_of(hold)
  local record = user and find_user(user)
  for _, part in ipairs(hold.on) do
    local counter, name = locate(part)
    if counter then
      local charged = part.charged
      change(counter, part, 0, 0, 0)
      charge(counter, part, math.max(0, (actual and actual[part.meter] or 0) - charged))
      store_located(part, name, counter)
      if part.home == user and name == part.name then
        note_counter(record, name, rest_us(part.shape, counter, part.amount * part.scale, part.rate))
      end
    end
  end
  if user then
    record.holds = record.holds - 1
    store_user(user, record)
  end
  redis.call('HDEL', keys.holds, request_id)
  redis.call('ZREM', keys.leases, request_id)
end

-- The reply of a grant: the limits as reserved, the windows, the parts, the current counters.
local function granted(hold, would_deny)
  local starts, raws, parts = {}, {}, {}
  for i, part in ipairs(hold.on) do
    starts[i] = part.start
    raws[i] = redis.call('HGET', hash_of(part.home), part.name) or ''
    parts[i] = {part.held, part.charged, part.most}
  end
  return {'granted', now_us, hold.limits, raws, parts, starts, hold.ahead, would_deny}
end

-- Whether the counters were lost, the tenant's or the platform's; every script checks this first.
local function is_lost()
  return redis.call('HGET', keys.counters, EPOCH) ~= ARGV[2]
    or keys.platform and redis.call('HGET', keys.platform, EPOCH) ~= ARGV[2]
end

-- Drops everything of a tenant.
local function drop()
  redis.call('DEL', keys.counters, keys.leases, keys.holds, keys.users, keys.resting)
end

-- Only the latest attempt at a rebuild may write; its first write drops what was there.
local function may_rebuild(attempt)
  if keys.platform and attempt < tonumber(redis.call('HGET', keys.platform, ATTEMPT) or '0') then
    return false
  end
  local latest = tonumber(redis.call('HGET', keys.counters, ATTEMPT) or '0')
  if attempt > latest then
    drop()
    redis.call('HSET', keys.counters, ATTEMPT, text(attempt))
  end
  return attempt >= latest
end
