-- Holds a request's amounts on every limit, or on none.
-- ARGV: now_us, epoch, request id, lease_us, limits as text, its end user (or empty), the most end users, ahead by
--   meter, then for each limit: name, shape, mode, meter, exact, first, ahead, most, amount, start_us, end_us, scale,
--   rate per ms, lowest, home

if is_lost() then
  return {'lost'}
end
local request_id = ARGV[3]
local existing = find_hold(request_id)
if existing then
  return granted(existing, {})
end

-- An end user without counters takes the place of the one that rests longest, once the most have theirs.
local user, gives_way = ARGV[6], nil
if user ~= '' and redis.call('HEXISTS', keys.users, user) == 0 then
  local forgotten_us = tonumber(redis.call('HGET', keys.counters, FORGOTTEN) or '0')
  if now_us < forgotten_us then
    return {'users', now_us, forgotten_us}
  elseif redis.call('HLEN', keys.users) >= tonumber(ARGV[7]) then
    local first = redis.call('ZRANGE', keys.resting, 0, 0, 'WITHSCORES')
    if not first[1] or tonumber(first[2]) > now_us then
      return {'users', now_us, first[2] and tonumber(first[2]) or -1}
    end
    gives_way = first[1]
  end
end

local hold = {limits = ARGV[5], ahead = by_meter(8), on = {}}
local found, over, raws, wishes, would_deny, refused = {}, {}, {}, {}, {}, false
for i = 8 + METERS, #ARGV, COLUMNS do
  local part = read_part(i)
  local wish = {first = tonumber(ARGV[i + 5]), ahead = tonumber(ARGV[i + 6]), most = tonumber(ARGV[i + 7])}
  local raw = redis.call('HGET', hash_of(part.home), part.name)
  local counter = parse(raw)
  local index = #hold.on + 1
  if part.shape == 'w' then
    if not counter or (counter[2] > 0 and now_us >= counter[2]) then
      -- A new window. The caller computes its bounds; its clock must agree with the server's on which one it is.
      local start_us, end_us = tonumber(ARGV[i + 9]), tonumber(ARGV[i + 10])
      if end_us > 0 and (now_us < start_us or now_us >= end_us) then
        return {'clock', now_us}
      end
      over[index] = counter
      counter = {start_us, end_us, 0, 0, 0}
    end
    part.start = counter[1]
  elseif part.shape == 'b' then
    counter = advance_bucket(part, counter, now_us)
  elseif not counter then
    counter = {0}
  end
  if is_short(counter, part, wish.first, wish.most) then
    if part.mode == HARD then
      refused = true
    elseif part.mode == SHADOW then
      would_deny[#would_deny + 1] = index
    end
  end
  raws[index], found[index], wishes[index], hold.on[index] = raw or '', counter, wish, part
end
if refused then
  return {'denied', now_us, raws}
end

if gives_way then
  forget_user(gives_way)
end
for i, part in ipairs(hold.on) do
  if over[i] then
    keep_window(part.home, part.name, over[i])
  end
  reach(found[i], part, wishes[i].ahead, wishes[i].most)
  store(part.home, part.name, found[i])
end
hold_on_user(hold)
store_hold(request_id, hold)
redis.call('ZADD', keys.leases, text(now_us + tonumber(ARGV[4])), request_id)
return granted(hold, would_deny)
